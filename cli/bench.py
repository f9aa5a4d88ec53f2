"""`dreams-nas bench`: drafts against plain decoding, measured and proven lossless."""

from typing import TYPE_CHECKING, Annotated

import typer

from dreams_nas.core.console import print_json_line, print_table
from dreams_nas.core.errors import UserError

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.bench.config import BenchConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(
        app,
        "dreams_nas.bench.config:BenchConfig",
        keys={
            "draft": "drafts",
            "passes": "num_passes",
            "policy": "policies",
            "reference": "references",
        },
    )
    def bench(
        build: ConfigBuilder,
        flags: RunFlags,
        draft: Annotated[
            list[str] | None,
            typer.Option(
                "--draft",
                metavar="[NAME=]DIR",
                help="Draft folder; may be repeated. The first one without a name is `winner`.",
            ),
        ] = None,
        data: Annotated[
            str | None,
            typer.Option("--data", metavar="DATA", help="`embedded:test` or a file."),
        ] = None,
        num_prompts: Annotated[
            int | None, typer.Option("--num-prompts", metavar="N", min=1, help="Prompts decoded.")
        ] = None,
        max_new_tokens: Annotated[
            int | None,
            typer.Option("--max-new-tokens", metavar="N", min=2, help="Longest answer, tokens."),
        ] = None,
        passes: Annotated[
            int | None, typer.Option("--passes", metavar="N", min=1, help="Interleaved passes.")
        ] = None,
        table: Annotated[
            str | None,
            typer.Option("--table", metavar="FILE", help="Latency table; predicts the speedup."),
        ] = None,
        chain: Annotated[
            int | None,
            typer.Option("--chain", metavar="LEVELS", min=1, help="Draft chains, not trees."),
        ] = None,
        policy: Annotated[
            list[str] | None,
            typer.Option(
                "--policy",
                metavar="NAME",
                help="Further policy of the winner: chain, dynamic, adaptive; may be repeated.",
            ),
        ] = None,
        reference: Annotated[
            list[str] | None,
            typer.Option(
                "--reference",
                metavar="NAME",
                help="transformers' decoding to time, too: generate, prompt_lookup or none.",
            ),
        ] = None,
        allow_mismatch: Annotated[
            bool,
            typer.Option("--allow-mismatch", help="Only warn about a table measured elsewhere."),
        ] = False,
    ) -> None:
        """Measure drafts against plain decoding, prove them lossless, replay the winner."""
        from dreams_nas.bench.arms import parse_drafts
        from dreams_nas.bench.losslessness import require_lossless
        from dreams_nas.bench.run import bench as run
        from dreams_nas.bench.summary import (
            DEFINITIONS,
            HEADERS,
            conditions,
            findings,
            summary_line,
            table_rows,
        )

        config: BenchConfig = build(
            draft=parse_drafts(draft) if draft else None,
            data=data,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            passes=passes,
            table=table,
            chain=chain,
            policy=policy or None,
            reference=_references(reference),
            allow_mismatch=allow_mismatch,
        )
        report = run(config, flags.quiet, flags.force)
        print_table(HEADERS, table_rows(report), "\n".join(conditions(report)))
        print("\n".join([*DEFINITIONS, *findings(report)]))
        print_json_line(summary_line(report))
        require_lossless(report.losslessness.mismatched_tokens)


def _references(names: list[str] | None) -> list[str] | None:
    """What `--reference` was given; `none` stands alone."""
    if not names:
        return None
    if "none" in names and len(names) > 1:
        raise UserError("--reference none and other references are both given; leave one out")
    return [name for name in names if name != "none"]
