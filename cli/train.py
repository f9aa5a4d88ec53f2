"""`dreams-nas train`: the supernet."""

from typing import TYPE_CHECKING

import typer

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.pipeline.config import TrainConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.pipeline.config:TrainConfig")
    def train(build: ConfigBuilder, flags: RunFlags) -> None:
        """Train the supernet of a search space on collected features; resumes.

        Example: dreams-nas train --set features=features/train --set train.recipe.max_seconds=600
        """
        from dreams_nas.core.console import print_json_line
        from dreams_nas.pipeline.verbs import train_verb

        config: TrainConfig = build()
        report = train_verb(config, quiet=flags.quiet, force=flags.force)
        print_json_line(
            {
                "supernet": config.out,
                "num_steps": report.num_steps,
                "seconds": report.seconds,
                "last": report.log[-1] if report.log else None,
            }
        )
