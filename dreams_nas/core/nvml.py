"""Finding the card that CUDA means among those that NVML knows.

NVML sees every card of the machine in PCI order, CUDA those of `CUDA_VISIBLE_DEVICES` in its
order, and under MIG only slices. A query that the driver refuses gives None and a warning; a
slice never borrows a number from its parent.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from dreams_nas.core.console import warn


class GpuReading(NamedTuple):
    """What NVML told; None for what it refused."""

    name: str | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None


def visible_entry(index: int, environ: Mapping[str, str]) -> str | None:
    """Return the entry of `CUDA_VISIBLE_DEVICES` that `cuda:index` stands for.

    Returns:
        An NVML index or a UUID (or its beginning) as text; None when there is no such entry.
        Without the variable, the index itself.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",")]
    for position, entry in enumerate(entries):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            entries = entries[:position]  # CUDA stops at the first entry that is no device: -1
            break
    return entries[index] if index < len(entries) else None


def read_gpu(
    index: int, nvml: Any | None, environ: Mapping[str, str], uuid: str | None = None
) -> GpuReading:
    """Ask NVML about the card or slice that CUDA calls `index`.

    Args:
        index: As CUDA counts.
        nvml: A module with pynvml's functions, None for pynvml itself.
        environ: Holds `CUDA_VISIBLE_DEVICES`.
        uuid: What CUDA says the UUID is, with or without its "GPU-" or "MIG-" prefix.
    """
    if nvml is None:
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        warn(f"NVML cannot be started ({error}); the GPU is described without it")
        return GpuReading()
    try:
        return _Reader(nvml).read(index, environ, uuid)
    finally:
        nvml.nvmlShutdown()


class _Reader:
    """Asks NVML, turning each refusal into None and a warning."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def ask(self, what: str, function: str, *args: Any, is_quiet: bool = False) -> Any:
        try:
            answer = getattr(self.nvml, function)(*args)
        except self.nvml.NVMLError as error:
            if not is_quiet:
                warn(f"NVML does not tell the {what} ({error}); it is recorded as null")
            return None
        return answer.decode() if isinstance(answer, bytes) else answer

    def read(self, index: int, environ: Mapping[str, str], uuid: str | None) -> GpuReading:
        handle, is_slice = self.find(index, environ, uuid)
        driver = self.ask("driver version", "nvmlSystemGetDriverVersion")
        if handle is None:
            warn(f"NVML does not know the device that CUDA calls cuda:{index}")
            return GpuReading(driver=driver)
        if not is_slice and self.is_split(handle):
            # CUDA shows only slices of a split card: the first one where a card is named.
            parent = handle
            handle, is_slice = self.first_slice(parent), True
            if handle is None:
                warn(f"cuda:{index} is a MIG slice that NVML does not show; identity unknown")
                return GpuReading(self.ask("name", "nvmlDeviceGetName", parent), driver=driver)
        memory = self.ask("memory size", "nvmlDeviceGetMemoryInfo", handle)
        return GpuReading(
            name=self.name(handle, is_slice),
            uuid=self.ask("UUID", "nvmlDeviceGetUUID", handle),
            memory_bytes=None if memory is None else int(memory.total),
            driver=driver,
        )

    def name(self, handle: Any, is_slice: bool) -> str | None:
        name = self.ask("name", "nvmlDeviceGetName", handle, is_quiet=is_slice)
        if name is None and is_slice:
            # The model name may come from the parent: it says what silicon it is, not how much.
            parent = self.ask("parent", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            name = None if parent is None else self.ask("name", "nvmlDeviceGetName", parent)
            return None if name is None else f"{name} (MIG slice)"
        return None if name is None else str(name)

    def find(
        self, index: int, environ: Mapping[str, str], uuid: str | None
    ) -> tuple[Any | None, bool]:
        """Return the handle and whether it is a MIG slice."""
        entry = visible_entry(index, environ)
        if entry is not None and entry.startswith("MIG-GPU-"):
            return self.old_style_slice(entry), True
        if entry is not None and entry.startswith("MIG-"):
            return self.by_uuid(entry) or self.by_prefix(entry), True
        if uuid is not None:
            bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
            for prefix in ("MIG-", "GPU-"):
                handle = self.by_uuid(f"{prefix}{bare}")
                if handle is not None:
                    return handle, prefix == "MIG-"
        if entry is None:
            return None, False
        if entry.isdecimal():
            return self.ask("card", "nvmlDeviceGetHandleByIndex", int(entry)), False
        return self.by_uuid(entry) or self.by_prefix(entry), False

    def by_uuid(self, uuid: str) -> Any | None:
        return self.ask("card", "nvmlDeviceGetHandleByUUID", uuid, is_quiet=True)

    def by_prefix(self, start: str) -> Any | None:
        """CUDA takes the beginning of a UUID, where only one card has it."""
        found = [
            handle
            for handle in self.cards_and_slices()
            if str(self.ask("UUID", "nvmlDeviceGetUUID", handle, is_quiet=True)).startswith(start)
        ]
        return found[0] if len(found) == 1 else None

    def old_style_slice(self, entry: str) -> Any | None:
        """Resolve "MIG-<card's UUID>/<GPU instance>/<compute instance>" of drivers before 470."""
        card, _, ids = entry.removeprefix("MIG-").partition("/")
        parent = self.by_uuid(card)
        for handle in [] if parent is None else self.slices(parent):
            gpu = self.ask("GPU instance", "nvmlDeviceGetGpuInstanceId", handle)
            compute = self.ask("compute instance", "nvmlDeviceGetComputeInstanceId", handle)
            if f"{gpu}/{compute}" == ids:
                return handle
        return None

    def cards_and_slices(self) -> list[Any]:
        handles = []
        for index in range(self.ask("number of cards", "nvmlDeviceGetCount") or 0):
            card = self.ask("card", "nvmlDeviceGetHandleByIndex", index, is_quiet=True)
            if card is not None:
                handles += [card, *self.slices(card)]
        return handles

    def is_split(self, handle: Any) -> bool:
        mode = self.ask("MIG mode", "nvmlDeviceGetMigMode", handle, is_quiet=True)
        return mode is not None and mode[0] == 1

    def slices(self, card: Any) -> list[Any]:
        count = self.ask("slices", "nvmlDeviceGetMaxMigDeviceCount", card, is_quiet=True) or 0
        found = [
            self.ask("slice", "nvmlDeviceGetMigDeviceHandleByIndex", card, i, is_quiet=True)
            for i in range(count)
        ]
        return [handle for handle in found if handle is not None]

    def first_slice(self, card: Any) -> Any | None:
        slices = self.slices(card)
        return slices[0] if slices else None
