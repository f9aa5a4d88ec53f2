"""The command line of the embedded target."""

from pathlib import Path

import pytest

from dreams_nas.targets.embedded import __main__ as command


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["embedded", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    return int(stopped.value.code or 0)


def test_a_missing_target_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "evaluate", "--target", str(tmp_path)) == 2
    assert "holds no target" in capsys.readouterr().err


def test_an_unknown_split_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "evaluate", "--split", "tests", "--count", "1") == 2
    assert "did you mean 'test'" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"")
    arguments = ("train", "--out", str(tmp_path), "--threads", "1", "--steps", "1")
    assert _run(monkeypatch, *arguments) == 1
    assert "is not a readable checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_help_names_the_options(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, verb, "--help") == 0
    assert "--threads" in capsys.readouterr().out
