"""Which device this is: CPU, cards under a reordered environment, MIG slices, refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dreams_nas.core import device as device_module
from dreams_nas.core.device import (
    Deployment,
    build_deployment,
    cpu_identity,
    gpu_identity,
    num_usable_cores,
    peak_bytes,
    resolve_device,
)
from dreams_nas.core.errors import UserError

GB = 10**9
CARDS = ["GPU-aaaa-0", "GPU-bbbb-1", "GPU-cccc-2"]
SLICES = {"GPU-cccc-2": ["MIG-1111", "MIG-2222"]}


class NVMLError(Exception):
    """Like pynvml's."""


class FakeNvml:
    """Three cards, the third split into two slices; handles are UUIDs; `refused` queries fail."""

    NVMLError = NVMLError

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.num_open = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "refused"):

            def refuse(*_: object) -> None:
                raise NVMLError("Insufficient Permissions")

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(CARDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index >= len(CARDS):
            raise NVMLError("Invalid Argument")
        return CARDS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in [*CARDS, *SLICES["GPU-cccc-2"]]:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        if handle.startswith("MIG-"):
            raise NVMLError("Not Supported")
        return f"Card {CARDS.index(handle)}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=10 * GB if handle.startswith("MIG-") else 80 * GB)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == CARDS[0]:
            raise NVMLError("Not Supported")
        return [1, 1] if handle in SLICES else [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7 if handle in SLICES else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index >= len(SLICES[handle]):
            raise NVMLError("Not Found")
        return SLICES[handle][index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return CARDS[2]

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return {"MIG-1111": 3, "MIG-2222": 5}[handle]

    def nvmlDeviceGetComputeInstanceId(self, handle: str) -> int:
        return 0


@pytest.mark.parametrize(
    ("visible", "index", "uuid"),
    [
        (None, 1, "GPU-bbbb-1"),
        ("1,0", 0, "GPU-bbbb-1"),
        ("1,0", 1, "GPU-aaaa-0"),
        ("GPU-bbbb-1,0", 0, "GPU-bbbb-1"),
        ("GPU-bb", 0, "GPU-bbbb-1"),
        ("MIG-2222", 0, "MIG-2222"),
        ("MIG-GPU-cccc-2/5/0", 0, "MIG-2222"),
        ("1,MIG-1111", 1, "MIG-1111"),
        ("2", 0, "MIG-1111"),
    ],
)
def test_the_card_is_found_by_uuid_as_cuda_counts(
    visible: str | None, index: int, uuid: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    nvml = FakeNvml()
    identity = gpu_identity(index, nvml=nvml, environ=environ)
    assert identity.uuid == uuid
    assert identity.memory_bytes == (10 * GB if uuid.startswith("MIG-") else 80 * GB)
    assert identity.driver == "570.1"
    assert nvml.num_open == 0


def test_the_uuid_from_torch_beats_the_order_of_nvml() -> None:
    assert gpu_identity(0, nvml=FakeNvml(), environ={}, uuid="bbbb-1").name == "Card 1"
    assert gpu_identity(0, nvml=FakeNvml(), environ={}, uuid="2222").uuid == "MIG-2222"


def test_a_slice_is_named_after_its_card_but_never_has_its_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvml = FakeNvml("nvmlDeviceGetMemoryInfo")
    identity = gpu_identity(0, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "MIG-2222"})
    assert identity.name == "Card 2 (MIG slice)"
    assert identity.memory_bytes is None
    assert "memory size (Insufficient Permissions); it is recorded as null" in (
        capsys.readouterr().err
    )


def test_a_split_card_whose_slices_are_hidden_has_no_uuid_and_no_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvml = FakeNvml("nvmlDeviceGetMigDeviceHandleByIndex")
    identity = gpu_identity(2, nvml=nvml, environ={})
    assert (identity.name, identity.uuid, identity.memory_bytes) == ("Card 2", None, None)
    assert "identity unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("refused", "field"),
    [
        ("nvmlDeviceGetUUID", "uuid"),
        ("nvmlDeviceGetMemoryInfo", "memory_bytes"),
        ("nvmlSystemGetDriverVersion", "driver"),
    ],
)
def test_a_refused_query_gives_null_and_a_warning(
    refused: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = gpu_identity(1, nvml=FakeNvml(refused), environ={})
    values = identity.model_dump()
    assert values.pop(field) is None
    assert None not in values.values()
    assert "it is recorded as null" in capsys.readouterr().err


@pytest.mark.parametrize("visible", ["", "-1", "0,-1,1", "7"])
def test_a_card_that_nvml_cannot_find_is_named_by_torch(
    visible: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index = 1 if visible.startswith("0") else 0
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    identity = gpu_identity(index, nvml=FakeNvml(), environ=environ, name="From torch")
    assert (identity.name, identity.uuid) == ("From torch", None)
    assert "NVML does not know the device" in capsys.readouterr().err


def test_no_driver_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    identity = gpu_identity(0, nvml=FakeNvml("nvmlInit"), environ={}, name="From torch")
    assert identity.name == "From torch"
    assert "NVML cannot be started" in capsys.readouterr().err


def test_the_cpu_is_named_by_its_model(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Abacus 9000 @ 1 GHz\nmodel name\t: Other\n")
    identity = cpu_identity(cpuinfo)
    assert identity.name == "Abacus 9000 @ 1 GHz"
    assert identity.label == f"Abacus 9000 @ 1 GHz ({num_usable_cores()} cores)"
    assert cpu_identity(tmp_path / "none").name


@pytest.mark.parametrize(
    ("num_cards", "asked", "resolved"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (2, "cpu", "cpu"),
    ],
)
def test_devices_are_resolved(
    num_cards: int, asked: str, resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    assert resolve_device(asked) == resolved


@pytest.mark.parametrize(
    ("num_cards", "asked", "message"),
    [
        (0, "cuda:0", r"device = cuda:0: torch .* sees no CUDA device here; use --device cpu"),
        (2, "cuda:2", r"device = cuda:2: this machine has cuda:0 to cuda:1"),
        (2, "gpu", r"device = gpu: should be auto, cpu or cuda:N"),
        (2, "cuda:x", r"device = cuda:x: should be auto"),
        (2, "cpu:0", r"device = cpu:0: should be auto"),
    ],
)
def test_impossible_devices_are_refused(
    num_cards: int, asked: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    with pytest.raises(UserError, match=message):
        resolve_device(asked)


def test_deployments_name_their_differences() -> None:
    ours = Deployment(device="cpu", device_name="Abacus", threads=2)
    assert ours.differences(ours) == []
    theirs = ours.replace(dtype="bfloat16", threads=1)
    assert ours.differences(theirs) == ["dtype: float32 against bfloat16", "threads: 2 against 1"]
    assert ours.key != theirs.key
    with pytest.raises(ValidationError):
        Deployment(device="cpu", device_name="Abacus", threads=0)


def test_the_deployment_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "num_usable_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    deployment = build_deployment("cpu", "float64")
    assert deployment.device_name == cpu_identity().name
    assert (deployment.device, deployment.dtype, deployment.threads) == ("cpu", "float64", 3)
    assert build_deployment("cpu", threads=1).threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert build_deployment("cpu").threads == 2


def test_peak_memory_is_in_bytes_and_grows() -> None:
    before = peak_bytes()
    assert before > 10 * 10**6
    block = bytearray(before)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_bytes() >= before + len(block) // 2
