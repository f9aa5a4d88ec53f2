"""Tables and JSON on stdout, everything else on stderr."""

import io
import json

import pytest
from rich.console import Console

from dreams_nas.core import console
from dreams_nas.core.console import (
    format_table,
    print_json_line,
    print_table,
    progress,
    say,
    warn,
)


def test_a_table_is_aligned_and_shows_what_was_not_measured() -> None:
    rows = [["plain", 1.0, 50], ["winner", None, 1234]]
    assert format_table(["arm", "speedup", "tokens"], rows) == (
        "arm     speedup  tokens\n"
        "------  -------  ------\n"
        "plain         1      50\n"
        "winner        -    1234"
    )


def test_stdout_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a"], [[1.23456]], "Conditions: none")
    warn("careful")
    say("loading")
    say("hidden", quiet=True)
    print_json_line({"speedup": 1.5, "winner": None, "name": "é"})
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "Conditions: none"
    assert lines[3] == "1.235"
    assert json.loads(lines[-1]) == {"speedup": 1.5, "winner": None, "name": "é"}
    assert captured.err == "warning: careful\nloading\n"


def test_json_line_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json_line({"speedup": float("nan")})


def test_progress_in_a_log_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("training", total=20) as bar:
        for _ in range(20):
            bar.advance()
        bar.describe("still training")
    with progress("quiet work", total=3, quiet=True) as bar:
        bar.advance(3)
    captured = capsys.readouterr()
    assert captured.err == "training (20) ...\n"
    assert captured.out == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(console, "stderr_console", lambda: terminal)
    with progress("training", total=20) as bar:
        bar.advance(20)
        bar.describe("trained")
    assert "trained" in screen.getvalue()
    assert "20/20" in screen.getvalue()
