"""`dreams-nas finetune`: one draft alone, its tree chosen again."""

from typing import TYPE_CHECKING

import typer

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.pipeline.config import FinetuneConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.pipeline.config:FinetuneConfig")
    def finetune(build: ConfigBuilder, flags: RunFlags) -> None:
        """Train one draft alone and choose its draft tree with its own weights; resumes.

        Example: dreams-nas finetune --set arch=search/arch.yaml --out draft
        """
        from dreams_nas.core.console import print_json_line
        from dreams_nas.pipeline.verbs import finetune_verb

        config: FinetuneConfig = build()
        evaluation = finetune_verb(config, quiet=flags.quiet, force=flags.force)
        print_json_line(
            {
                "draft": config.out,
                "arch": evaluation.arch.model_dump(mode="json"),
                "policy": evaluation.tree.describe(),
                "acceptance_length_replayed": evaluation.acceptance_length,
                "speedup_predicted": evaluation.speedup_predicted.quantiles(),
            }
        )
