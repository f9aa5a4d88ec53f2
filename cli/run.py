"""`dreams-nas run CONFIG.yaml`: every stage, in one folder, resumed where it stopped."""

from typing import TYPE_CHECKING

import typer

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.pipeline.config import RunConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.pipeline.config:RunConfig", config_argument=True)
    def run(build: ConfigBuilder, flags: RunFlags) -> None:
        """Collect, profile, train, search, finetune, bench, export, report; resumes.

        Example: dreams-nas run my_run.yaml --out runs/first --set finetune.max_seconds=600
        """
        run_and_print(build(), flags)


def run_and_print(config: "RunConfig", flags: RunFlags) -> None:
    """Do a whole run, show its bench and end with the JSON line.

    Raises:
        RunError: An answer differs from plain decoding without an explanation.
    """
    from pathlib import Path

    from dreams_nas.bench.losslessness import require_lossless
    from dreams_nas.core.console import print_json_line
    from dreams_nas.core.files import read_text
    from dreams_nas.pipeline.run import run

    line = run(config, quiet=flags.quiet, force=flags.force)
    print(read_text(Path(config.out) / "bench" / "summary.md"))
    print(f"report: {config.out}/report")
    print_json_line(line)
    require_lossless(line["mismatched_tokens"])
