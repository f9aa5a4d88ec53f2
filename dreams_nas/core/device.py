"""Which device this is, and the deployment that a latency table is for.

torch is imported only inside functions. GPUs are identified by UUID, since an index means another
card under another `CUDA_VISIBLE_DEVICES`.
"""

import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field

from dreams_nas.core.config import Config
from dreams_nas.core.errors import UserError
from dreams_nas.core.nvml import GpuReading, read_gpu

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Mode = Literal["eager", "compiled", "graph"]
Attention = Literal["sdpa", "eager"]


class DeviceIdentity(Config):
    """The header of a latency table: which device was measured."""

    kind: Literal["cpu", "cuda"]
    """Kind of device."""
    name: str
    """Model name of the CPU or of the card."""
    uuid: str | None = None
    """UUID of the card or MIG slice; null on a CPU or when the driver refuses it."""
    num_cores: int
    """CPU cores this process may use."""
    memory_bytes: int | None = None
    """Memory of the card or of the slice in bytes; null when the driver refuses it."""
    driver: str | None = None
    """Version of the GPU driver."""

    @property
    def label(self) -> str:
        """The name with what tells two of a kind apart."""
        return f"{self.name} ({self.uuid or f'{self.num_cores} cores'})"


class Deployment(Config):
    """What a latency table is for. Two numbers are comparable only within one deployment."""

    device: Literal["cpu", "cuda"]
    """Kind of device; which card it was is told by the UUID in the table's header."""
    device_name: str
    """Model name of the CPU or of the card."""
    dtype: Dtype = "float32"
    """Precision of target and draft."""
    mode: Mode = "eager"
    """How a step runs: eager, compiled, or as a captured graph."""
    attention: Attention = "sdpa"
    """Attention backend of target and draft."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one operation."""
    batch: int = Field(default=1, ge=1)
    """Prompts decoded together."""
    quantization: str = "none"
    """Quantisation of the target's weights."""

    @property
    def key(self) -> str:
        """A short name for tables and plots."""
        return (
            f"{self.device_name} {self.dtype} {self.mode} {self.attention} "
            f"threads={self.threads} batch={self.batch} quantization={self.quantization}"
        )

    def differences(self, other: "Deployment") -> list[str]:
        """Name each field that differs, with both values; empty when the two are comparable."""
        return [
            f"{name}: {getattr(self, name)} against {getattr(other, name)}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


def num_usable_cores() -> int:
    """Return the CPU cores this process may run on, which a container may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Return the CPU threads of one operation: `OMP_NUM_THREADS` if it is set, else all cores."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else num_usable_cores()


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> DeviceIdentity:
    """Return the CPU's model name, the usable cores and the machine's memory."""
    name = ""
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        name = next(
            (ln.partition(":")[2].strip() for ln in lines if ln.startswith("model name")), ""
        )
    return DeviceIdentity(
        kind="cpu",
        name=name or platform.processor() or platform.machine() or "unknown CPU",
        num_cores=num_usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
    )


def gpu_identity(
    index: int,
    *,
    nvml: Any | None = None,
    environ: Mapping[str, str] | None = None,
    name: str | None = None,
    uuid: str | None = None,
) -> DeviceIdentity:
    """Identify a card as CUDA counts it.

    Args:
        index: N of `cuda:N`, an index into the visible devices.
        nvml: A module with pynvml's functions; injected in tests.
        environ: Environment that holds `CUDA_VISIBLE_DEVICES`; injected in tests.
        name: Model name from torch, used when NVML refuses it.
        uuid: UUID from torch, which makes guessing the order of cards needless.

    Returns:
        The identity; what NVML refused is null, and a warning was printed.
    """
    reading = read_gpu(index, nvml, os.environ if environ is None else environ, uuid)
    return _gpu_identity(reading, name)


def _gpu_identity(reading: GpuReading, name: str | None) -> DeviceIdentity:
    return DeviceIdentity(
        kind="cuda",
        name=reading.name or name or "unknown GPU",
        uuid=reading.uuid,
        num_cores=num_usable_cores(),
        memory_bytes=reading.memory_bytes,
        driver=reading.driver,
    )


def identify_device(device: str) -> DeviceIdentity:
    """Identify a resolved device, "cpu" or "cuda:N"."""
    if device == "cpu":
        return cpu_identity()
    import torch

    index = int(device.partition(":")[2] or 0)
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    return gpu_identity(index, name=properties.name, uuid=None if uuid is None else str(uuid))


def resolve_device(device: str) -> str:
    """Turn "auto", "cpu", "cuda" or "cuda:N" into a device that torch has here.

    Returns:
        "cpu" or "cuda:N".

    Raises:
        UserError: unknown name, no CUDA, or no such card.
    """
    kind, _, number = device.partition(":")
    is_known = device in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isdecimal())
    if not is_known:
        raise UserError(f"device = {device}: should be auto, cpu or cuda:N, e.g. cuda:0")
    if device == "cpu":
        return device
    import torch

    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if num_cards else "cpu"
    if num_cards == 0:
        raise UserError(
            f"device = {device}: torch {torch.__version__} sees no CUDA device here; "
            "use --device cpu, or run `dreams-nas doctor`"
        )
    index = int(number or 0)
    if index >= num_cards:
        raise UserError(f"device = {device}: this machine has cuda:0 to cuda:{num_cards - 1}")
    return f"cuda:{index}"


def build_deployment(
    device: str,
    dtype: Dtype = "float32",
    *,
    mode: Mode = "eager",
    attention: Attention = "sdpa",
    threads: int | None = None,
    batch: int = 1,
    quantization: str = "none",
) -> Deployment:
    """Describe a deployment on a resolved device, "cpu" or "cuda:N".

    Threads left out are `default_threads`.
    """
    identity = identify_device(device)
    return Deployment(
        device=identity.kind,
        device_name=identity.name,
        dtype=dtype,
        mode=mode,
        attention=attention,
        threads=threads if threads is not None else default_threads(),
        batch=batch,
        quantization=quantization,
    )


def peak_bytes() -> int:
    """Return the largest resident memory this process has had so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
