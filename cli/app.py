"""The `dreams-nas` program: one verb per stage, registered from the file of that name."""

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dreams_nas import __version__

from .errors import run_guarded

VERBS = (
    "demo",
    "run",
    "collect",
    "profile",
    "train",
    "search",
    "finetune",
    "export",
    "bench",
    "calibrate",
    "generate",
    "report",
    "doctor",
)
"""In the order `--help` shows them; each is a file beside this one with `register(app)`."""


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"dreams-nas {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Find, train and prove the draft model that makes a target decode fastest on this machine.

    Results go to stdout and end with one line of JSON, diagnostics to stderr. Exit code 0: done;
    1: the run failed; 2: the input was wrong.
    """


def build_app() -> typer.Typer:
    """Return the app with all its verbs; nothing heavy is imported."""
    app = typer.Typer(
        name="dreams-nas",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_root)
    for verb in VERBS:
        importlib.import_module(f"{__package__}.{verb}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    app = build_app()
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_guarded(lambda: typer.main.get_command(app).main(arguments, prog_name="dreams-nas"))


if __name__ == "__main__":
    sys.exit(main())
