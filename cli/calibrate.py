"""`dreams-nas calibrate`: how often a draft's paths are accepted, for the adaptive policy."""

from typing import TYPE_CHECKING, Annotated

import typer

from dreams_nas.core.console import print_json_line, say

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.bench.config import CalibrateConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.bench.config:CalibrateConfig", replaces=False)
    def calibrate(
        build: ConfigBuilder,
        flags: RunFlags,
        draft: Annotated[
            str | None,
            typer.Option("--draft", metavar="DIR", help="Draft folder; gets the calibration."),
        ] = None,
        data: Annotated[
            str | None,
            typer.Option("--data", metavar="DATA", help="`embedded:choose` or a file."),
        ] = None,
        num_prompts: Annotated[
            int | None, typer.Option("--num-prompts", metavar="N", min=3, help="Prompts decoded.")
        ] = None,
    ) -> None:
        """Calibrate a draft's path probabilities on validation prompts, and store them with it.

        A run takes its own draft folders for changed then and makes them anew: calibrate a copy.

        Example: cp -r runs/demo/export my_draft; dreams-nas calibrate --draft my_draft
        """
        config: CalibrateConfig = build(draft=draft, data=data, num_prompts=num_prompts)
        from dreams_nas.bench.calibrate import calibrate_folder

        found = calibrate_folder(config, flags.quiet)
        say(
            f"{found.num_rounds} rounds fitted, error on held-out prompts {found.error:.4f}",
            flags.quiet,
        )
        print_json_line(
            {
                "draft": config.draft,
                "calibration_error": found.error,
                "num_rounds": found.num_rounds,
            }
        )
