"""`dreams-nas search`: the fastest draft of a supernet on this deployment."""

from typing import TYPE_CHECKING

import typer

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.pipeline.config import SearchVerbConfig
    from dreams_nas.search.result import SearchResult


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.pipeline.config:SearchVerbConfig")
    def search(build: ConfigBuilder, flags: RunFlags) -> None:
        """Price every draft by replay and table, decode the finalists, name a winner; resumes.

        Example: dreams-nas search --set supernet=supernet --set table=table.json --out search
        """
        from dreams_nas.core.console import print_json_line
        from dreams_nas.pipeline.verbs import search_verb

        config: SearchVerbConfig = build()
        result = search_verb(config, quiet=flags.quiet, force=flags.force)
        _print_summary(result)
        winner = result.winner
        print_json_line(
            {
                "winner": None
                if winner is None
                else {
                    "arch": winner.arch.model_dump(mode="json"),
                    "policy": winner.policy.describe(),
                },
                "num_evaluations": len(result.evaluations),
                "finalists": [f.model_dump(mode="json") for f in result.choice.finalists],
                "out": config.out,
            }
        )


def _print_summary(result: "SearchResult") -> None:
    from dreams_nas.core.console import print_table

    measured = {f.arch.key: f.speedup_measured for f in result.choice.finalists}
    best = sorted(result.evaluations, key=lambda e: -e.speedup)[:10]
    print_table(
        ("draft", "levels", "nodes", "tau", "round ms", "predicted", "measured"),
        [
            (
                e.arch.key,
                e.tree.num_levels,
                e.tree.num_nodes,
                e.acceptance_length,
                e.round_ms,
                e.speedup,
                measured.get(e.arch.key),
            )
            for e in best
        ],
        f"{len(result.evaluations)} drafts, ratio of sums against plain decoding; best ten",
    )
