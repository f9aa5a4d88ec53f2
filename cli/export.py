"""`dreams-nas export`: a draft with its model card, ready to hand over."""

from typing import TYPE_CHECKING, Annotated

import typer

from dreams_nas.core.console import print_json_line

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.export.config import ExportConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.export.config:ExportConfig", replaces=False)
    def export(
        build: ConfigBuilder,
        flags: RunFlags,
        draft: Annotated[
            str | None, typer.Option("--draft", metavar="DIR", help="Draft folder.")
        ] = None,
        format: Annotated[
            str | None,
            typer.Option("--format", metavar="FORMAT", help="`dreams-nas`, our own."),
        ] = None,
        bench: Annotated[
            str | None,
            typer.Option(
                "--bench", metavar="PATH", help="bench.json whose table goes into the model card."
            ),
        ] = None,
    ) -> None:
        """Export a draft with a model card and check that it reads back equal."""
        config: ExportConfig = build(draft=draft, format=format, bench=bench)
        from dreams_nas.export.own import export as write

        exported = write(config)
        print(f"{config.out}: draft {exported.arch.key} for {exported.target_name}")
        print_json_line(
            {
                "export": config.out,
                "format": config.format,
                "arch": exported.arch,
                "policy": exported.policy.describe() if exported.policy is not None else None,
                "target": exported.target_name,
            }
        )
