"""`dreams-nas demo`: the whole run on the embedded target."""

from pathlib import Path
from typing import Annotated

import typer

from dreams_nas.core.errors import UserError

from .options import ForceOption, QuietOption, RunFlags, SeedOption, ThreadsOption
from .run import run_and_print


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command()
    def demo(
        out: Annotated[
            Path, typer.Option("--out", metavar="DIR", help="Run folder; an old one goes on.")
        ] = Path("runs/demo"),
        quick: Annotated[
            bool, typer.Option("--quick", help="A few steps and prompts: shows that all works.")
        ] = False,
        full: Annotated[
            bool,
            typer.Option("--full", help="Longer training; eagle3 trained alone by its own recipe."),
        ] = False,
        threads: ThreadsOption = None,
        seed: SeedOption = None,
        quiet: QuietOption = False,
        force: ForceOption = False,
    ) -> None:
        """Search a draft for the embedded chart reader on this machine, prove it, export it.

        About ten minutes on two cores; nothing else should run meanwhile.

        Example: dreams-nas demo --out runs/demo
        """
        if quick and full:
            raise UserError("--quick and --full are both given; leave one out")
        from dreams_nas.pipeline.demo import demo_config

        config = demo_config(
            "quick" if quick else "full" if full else "demo",
            out=out.as_posix(),
            threads=threads,
            seed=seed or 0,
        )
        run_and_print(config, RunFlags(quiet, force))
