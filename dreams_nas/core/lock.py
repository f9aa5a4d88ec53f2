"""One clock at a time: a second process on the machine ruins every measured time.

`profile`, `demo` and `bench` take the lock of this machine and user, and warn when other
processes are busy.
"""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from dreams_nas.core.console import say, warn
from dreams_nas.core.errors import UserError

_POLL_S = 0.2
_depth = 0
"""How many `machine_lock` blocks this process is inside of."""


def lock_path() -> Path:
    """Return the lock file of this user on this machine, or `DREAMS_NAS_LOCK` if set (tests)."""
    if path := os.environ.get("DREAMS_NAS_LOCK"):
        return Path(path)
    return Path(tempfile.gettempdir()) / f"dreams-nas-{os.getuid()}.lock"


@contextmanager
def machine_lock(purpose: str, wait_s: float | None = None, quiet: bool = False) -> Iterator[None]:
    """Hold the machine for measuring while the block runs.

    The lock is the kernel's (flock): it goes with the process, even after kill -9. A process
    that holds it may take it again, and so may the processes it started.

    Args:
        purpose: What for, shown to whoever waits, e.g. "profile".
        wait_s: Longest wait in seconds, 0 for none, None for as long as it takes.
        quiet: Do not say that we wait.

    Raises:
        UserError: another process still holds the lock; names its pid and purpose.
    """
    global _depth
    if _depth > 0 or _is_ancestor(_read_holder()[0]):
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    handle = os.open(lock_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _acquire(handle, purpose, wait_s, quiet)
        os.truncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "purpose": purpose}).encode(), 0)
        _depth = 1
        try:
            yield
        finally:
            _depth = 0
            os.truncate(handle, 0)
    finally:
        os.close(handle)


def _acquire(handle: int, purpose: str, wait_s: float | None, quiet: bool) -> None:
    started = time.monotonic()
    is_announced = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, holder_purpose = _read_holder()
            holder = f"process {pid} ({holder_purpose})" if pid else "another process"
        else:
            return
        if wait_s is not None and time.monotonic() - started >= wait_s:
            raise UserError(
                f"{purpose} needs this machine to itself, but {holder} is measuring on it; "
                "wait for it to end, or stop it"
            )
        if not is_announced:
            say(f"{purpose}: waiting until {holder} has finished measuring", quiet)
            is_announced = True
        time.sleep(_POLL_S)


def _read_holder() -> tuple[int, str]:
    """Return pid and purpose of the holder, or (0, "") when nobody has signed."""
    try:
        holder = json.loads(lock_path().read_text())
        return int(holder["pid"]), str(holder["purpose"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def _is_ancestor(pid: int) -> bool:
    """Whether the process `pid` started us, directly or not, and is still there."""
    if pid <= 1:
        return False
    return any(parent.pid == pid for parent in psutil.Process().parents())


class ProcessLoad(NamedTuple):
    """How busy one process was."""

    pid: int
    name: str
    num_cores: float
    """Cores it kept busy, on average."""


def measure_load(interval_s: float = 0.5) -> list[ProcessLoad]:
    """Measure how many cores each process outside our own family keeps busy, busiest first.

    Our family is this process, its descendants and its ancestors, which wait for us.
    """
    before = _cpu_seconds()
    time.sleep(interval_s)
    after = _cpu_seconds()
    loads = [
        ProcessLoad(pid, name, (seconds - before[pid, name]) / interval_s)
        for (pid, name), seconds in after.items()
        if (pid, name) in before
    ]
    return sorted(loads, key=lambda load: -load.num_cores)


def _cpu_seconds() -> dict[tuple[int, str], float]:
    me = psutil.Process()
    family = {me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(True))}
    seconds = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if process.pid not in family and times is not None:
            seconds[process.pid, str(process.info["name"])] = times.user + times.system
    return seconds


def warn_if_loaded(
    max_cores: float = 0.25, measure: Callable[[], list[ProcessLoad]] = measure_load
) -> float:
    """Warn on stderr when other processes are busy, naming the busiest.

    Args:
        max_cores: Load of other processes, in cores, that is let pass.
        measure: Injected in tests.

    Returns:
        The load of other processes, in cores, to be recorded beside what is measured.
    """
    loads = measure()
    total = sum(load.num_cores for load in loads)
    if total > max_cores:
        busiest = ", ".join(f"{load.name} (pid {load.pid})" for load in loads[:3] if load[2] > 0.05)
        warn(
            f"other processes keep {total:.1f} cores busy{f': {busiest}' if busiest else ''}; "
            "measured times will be too long and uneven"
        )
    return total
