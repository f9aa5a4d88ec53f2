"""The machine lock and the warning about other load."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dreams_nas.core.errors import UserError
from dreams_nas.core.lock import (
    ProcessLoad,
    lock_path,
    machine_lock,
    measure_load,
    warn_if_loaded,
)

HOLD = """
import sys
from dreams_nas.core.lock import machine_lock
with machine_lock("profile"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMS_NAS_LOCK", str(tmp_path / "lock"))


@contextmanager
def another_holder() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_lock_is_per_user_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DREAMS_NAS_LOCK")
    assert lock_path().name == f"dreams-nas-{os.getuid()}.lock"


def test_the_holder_signs_and_its_name_goes_with_it() -> None:
    with machine_lock("bench"):
        assert json.loads(lock_path().read_text()) == {"pid": os.getpid(), "purpose": "bench"}
    assert lock_path().read_text() == ""


def test_a_second_process_is_refused_naming_pid_and_purpose() -> None:
    with (
        another_holder() as holder,
        pytest.raises(
            UserError, match=rf"demo needs .* process {holder.pid} \(profile\) is measuring"
        ),
        machine_lock("demo", wait_s=0),
    ):
        pass


def test_a_second_process_waits_and_says_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    with another_holder() as holder:
        assert holder.stdin is not None
        with pytest.raises(UserError), machine_lock("demo", wait_s=0.1):
            pass
        holder.stdin.write("\n")
        holder.stdin.flush()
        with machine_lock("demo", wait_s=60):
            assert json.loads(lock_path().read_text())["purpose"] == "demo"
        expected = f"demo: waiting until process {holder.pid} (profile) has finished measuring"
    assert expected in capsys.readouterr().err


def test_the_lock_goes_with_a_killed_holder() -> None:
    with another_holder() as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with machine_lock("demo", wait_s=5):
            pass


def test_a_holder_and_its_children_may_take_it_again() -> None:
    code = (
        "from dreams_nas.core.lock import machine_lock\n"
        "with machine_lock('bench', wait_s=0): print('inside')"
    )
    with machine_lock("demo"):
        with machine_lock("profile", wait_s=0):
            pass
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert json.loads(lock_path().read_text())["purpose"] == "demo"
    assert child.stdout == "inside\n"


def test_the_lock_is_released_after_an_error() -> None:
    with pytest.raises(KeyError), machine_lock("demo"):
        raise KeyError
    with machine_lock("demo", wait_s=0):
        pass


def test_a_busy_machine_is_warned_about_naming_the_busiest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loads = [ProcessLoad(7, "trainer", 1.5), ProcessLoad(8, "editor", 0.01)]
    assert warn_if_loaded(measure=lambda: loads) == pytest.approx(1.51)
    warning = capsys.readouterr().err
    assert "1.5 cores busy: trainer (pid 7);" in warning
    assert "editor" not in warning


def test_an_idle_machine_is_not_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert warn_if_loaded(measure=lambda: [ProcessLoad(8, "editor", 0.2)]) == 0.2
    assert capsys.readouterr().err == ""


def test_our_own_family_is_not_load() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            pids = {load.pid for load in measure_load(interval_s=0.05)}
        finally:
            child.kill()
    assert not pids & {os.getpid(), os.getppid(), child.pid}
