"""The program: help without torch, exit codes, precedence of flags, no tracebacks."""

import errno
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer

from dreams_nas import __version__
from dreams_nas.cli.app import VERBS, build_app, main
from dreams_nas.cli.errors import run_guarded
from dreams_nas.cli.options import ConfigBuilder, RunFlags, config_from_flags, verb
from dreams_nas.core.config import Config
from dreams_nas.core.errors import RunError, UserError


class Inner(Config):
    """Nested settings."""

    dtype: str = "float32"
    """Precision of the draft."""


class Example(Config):
    """What the example verb takes."""

    seed: int = 0
    """Root seed of the example."""
    out: Path = Path("runs")
    """Where to."""
    inner: Inner = Inner()
    """Nested."""


def example_app(seen: list[tuple[Example, RunFlags, int]], **options: bool) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.callback()(lambda: None)

    @verb(app, f"{__name__}:Example", keys={"dtype": "inner.dtype"}, **options)
    def example(
        build: ConfigBuilder,
        flags: RunFlags,
        prompts: Annotated[int, typer.Option(help="How many.")] = 3,
    ) -> None:
        """Do an example."""
        seen.append((build(), flags, prompts))

    return app


def call(app: typer.Typer, *arguments: str) -> int:
    return run_guarded(lambda: typer.main.get_command(app).main(["example", *arguments]))


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dreams_nas.cli.app import main\n"
        "for arguments in (['--help'], ['--version']): assert main(arguments) == 0\n"
        "heavy = {'torch', 'pandas', 'numpy', 'transformers', 'optuna', 'matplotlib', 'PIL'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [f"dreams-nas {__version__}", "[]"]


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    missing = [name for name in VERBS if f"\n  {name} " not in shown]
    assert missing == []


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_registers_itself_and_has_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(importlib.import_module(f"dreams_nas.cli.{name}").register)
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: dreams-nas {name}" in shown
    assert "Traceback" not in shown


def test_an_unknown_verb_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["colect"]) == 2
    assert "colect" in capsys.readouterr().err


def test_building_the_app_twice_gives_the_same_verbs() -> None:
    first, second = (
        [command.name for command in build_app().registered_commands] for _ in range(2)
    )
    assert first == second


def test_a_flag_beats_set_and_yaml_and_the_rest_is_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\ninner: {dtype: bfloat16}\n")
    seen: list[tuple[Example, RunFlags, int]] = []
    app = example_app(seen)
    assert call(app) == 0
    assert call(app, "--config", str(file)) == 0
    assert call(app, "--config", str(file), "--set", "seed=2", "--quiet", "--prompts", "5") == 0
    assert call(app, "--config", str(file), "--seed", "3", "--dtype", "float64", "--force") == 0
    assert [config.seed for config, _, _ in seen] == [0, 1, 2, 3]
    assert [config.inner.dtype for config, _, _ in seen] == [
        "float32",
        "bfloat16",
        "bfloat16",
        "float64",
    ]
    assert [prompts for _, _, prompts in seen] == [3, 3, 5, 3]
    assert [flags for _, flags, _ in seen][2:] == [RunFlags(True, False), RunFlags(False, True)]
    assert seen[0][0].out == Path("runs")


def test_a_config_may_be_an_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\n")
    seen: list[tuple[Example, RunFlags, int]] = []
    app = example_app(seen, config_argument=True)
    assert call(app, str(file)) == 0
    assert seen[0][0].seed == 1
    assert call(app, str(file), "--config", str(file)) == 2
    assert "leave one out" in capsys.readouterr().err


def test_a_verb_that_replaces_nothing_has_no_force(capsys: pytest.CaptureFixture[str]) -> None:
    app = example_app([], replaces=False)
    assert call(app, "--force") == 2
    assert call(app, "--help") == 0
    assert "--force" not in capsys.readouterr().out


def test_help_of_a_verb_shows_shared_flags_and_config_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(example_app([]), "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for flag in ("config", "set", "out", "target", "device", "dtype", "threads", "seed"):
        assert f"--{flag} " in shown
    assert "--quiet" in shown
    assert "--force" in shown
    assert "Do an example." in shown
    assert "inner.dtype Precision of the draft. [default: float32]" in shown
    assert "seed Root seed of the example. [default: 0]" in shown


def test_a_flag_without_effect_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(example_app([]), "--threads", "2") == 0
    assert capsys.readouterr().err == "warning: --threads is not used here\n"


def test_flag_and_set_must_not_contradict() -> None:
    with pytest.raises(UserError, match=r"--seed and --set seed=\.\.\. are both given"):
        config_from_flags(Example, None, ["seed=1"], seed=2)


def test_a_wrong_key_or_value_ends_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = example_app([])
    assert call(app, "--set", "sed=1") == 2
    assert "unknown key 'sed' (did you mean 'seed'?)" in capsys.readouterr().err
    assert call(app, "--set", "seed=x") == 2
    assert "--set seed=x: seed = x: input should be a valid integer" in capsys.readouterr().err
    assert call(app, "--config", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err
    assert call(app, "--threads", "0") == 2
    assert "--threads" in capsys.readouterr().err


def raises(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("no such target"), 2, "error: no such target\n"),
        (RunError("3 mismatches"), 1, "failed: 3 mismatches\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "No space left"), 1, "failed: the disk is full"),
        (MemoryError(), 1, "failed: out of memory\n"),
        (KeyError("x"), 1, "failed: KeyError: 'x'\nthis was not foreseen"),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DREAMS_NAS_DEBUG", raising=False)
    assert run_guarded(raises(error)) == code
    shown = capsys.readouterr().err
    assert shown.startswith(message)
    assert "Traceback" not in shown


def test_an_invalid_config_built_in_code_is_a_user_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_guarded(lambda: Example(seed="x")) == 2  # type: ignore[arg-type]
    assert "seed" in capsys.readouterr().err


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DREAMS_NAS_DEBUG", "1")
    assert run_guarded(raises(UserError("wrong"))) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("error: wrong\n")


def test_the_installed_program_reports_its_version() -> None:
    program = Path(sys.executable).with_name("dreams-nas")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dreams-nas {__version__}\n"
