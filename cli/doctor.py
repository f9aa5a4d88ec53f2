"""`dreams-nas doctor`: what this machine has, what is missing."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command()
    def doctor(
        out: Annotated[
            Path, typer.Option("--out", metavar="DIR", help="Where runs would be written.")
        ] = Path("runs"),
    ) -> None:
        """Say what this machine has, what is missing, and what would spoil a measurement."""
        from dreams_nas.core.console import print_json_line, print_table
        from dreams_nas.pipeline.doctor import examine

        findings = examine(out)
        print_table(
            ("looked at", "found", "problem"),
            [(f.what, f.value, f.problem or "none") for f in findings],
        )
        print_json_line({"problems": [f"{f.what}: {f.problem}" for f in findings if f.problem]})
