"""`dreams-nas report`: plots and tables of a run on one Markdown page."""

from typing import Annotated

import typer

from dreams_nas.core.console import print_json_line

from .options import ConfigBuilder, RunFlags, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.bench.config:ReportConfig", replaces=False)
    def report(
        build: ConfigBuilder,
        flags: RunFlags,
        run_dir: Annotated[
            str | None, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")
        ] = None,
    ) -> None:
        """Write the report of a run: Pareto front, latency, acceptance, speedup, tables."""
        from dreams_nas.bench.report import report as write

        page = write(build(run_dir=run_dir))
        plots = sorted(path.name for path in page.parent.glob("*.png"))
        print(f"{page} and {len(plots)} plots")
        print_json_line({"report": page, "plots": plots})
