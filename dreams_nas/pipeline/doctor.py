"""`dreams-nas doctor`: what this machine has, what is missing, what a demo would cost."""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dreams_nas.core.device import identify_device, num_usable_cores
from dreams_nas.core.files import format_bytes
from dreams_nas.core.lock import measure_load
from dreams_nas.core.provenance import package_versions
from dreams_nas.targets.embedded import embedded_target_path

DEMO_MEMORY_BYTES = 4_000_000_000
"""Peak memory a demo stays under."""

DEMO_DISK_BYTES = 2_000_000_000
"""Disk a demo's run folder takes, features of three splits included."""

_MAX_LOAD_CORES = 0.25


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    value: str
    problem: str | None
    """What to do about it; None when nothing is wrong."""


def examine(folder: Path) -> list[Finding]:
    """Look at everything a run needs.

    Args:
        folder: Where runs would be written.
    """
    import torch

    findings = [_python(), _torch(torch)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        findings.append(Finding(f"cuda:{index}", identify_device(f"cuda:{index}").label, None))
    findings += [
        Finding("cpu", identify_device("cpu").label, None),
        _memory(),
        _disk(folder),
        _load(),
        _embedded(),
    ]
    return findings


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    is_old = sys.version_info < (3, 11)
    return Finding("python", version, "needs 3.11 or newer" if is_old else None)


def _torch(torch: Any) -> Finding:
    versions = package_versions()
    missing = [name for name, version in versions.items() if version is None]
    text = f"{versions['torch']}, transformers {versions['transformers']}"
    problem = f"not installed: {', '.join(missing)}; run `make install`" if missing else None
    cuda = torch.version.cuda or "none"
    return Finding("torch", f"{text}, CUDA {cuda}", problem)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    problem = None
    if free < DEMO_MEMORY_BYTES:
        problem = f"a demo takes up to {format_bytes(DEMO_MEMORY_BYTES)}"
    return Finding("memory free", format_bytes(free), problem)


def _disk(folder: Path) -> Finding:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    problem = None
    if free < DEMO_DISK_BYTES:
        problem = f"a demo writes up to {format_bytes(DEMO_DISK_BYTES)}; choose another --out"
    return Finding("disk free", format_bytes(free), problem)


def _load() -> Finding:
    loads = measure_load()
    total = sum(load.num_cores for load in loads)
    problem = None
    if total > _MAX_LOAD_CORES:
        problem = f"measured times will be wrong; busiest: {loads[0].name} (pid {loads[0].pid})"
    return Finding(f"busy cores of {num_usable_cores()}", f"{total:.1f}", problem)


def _embedded() -> Finding:
    path = embedded_target_path()
    weights = path / "model.safetensors"
    if not weights.is_file():
        return Finding("embedded target", "missing", "install dreams-nas again")
    return Finding("embedded target", format_bytes(weights.stat().st_size), None)
