"""`dreams-nas profile`: measure this machine into a latency table."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreams_nas.core.console import print_json_line, print_table
from dreams_nas.core.errors import UserError

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.latency.table import LatencyTable
    from dreams_nas.profiling.config import ProfileConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.profiling.config:ProfileConfig")
    def profile(
        build: ConfigBuilder,
        flags: RunFlags,
        space: Annotated[
            str | None,
            typer.Option("--space", metavar="NAME", help="Search space: shipped, or a YAML file."),
        ] = None,
        max_kv: Annotated[
            int | None, typer.Option("--max-kv", metavar="N", help="Most committed rows.")
        ] = None,
        max_q: Annotated[
            int | None, typer.Option("--max-q", metavar="N", help="Most verified rows, n + 1.")
        ] = None,
        budget_s: Annotated[
            float | None, typer.Option("--budget-s", metavar="S", help="Seconds to measure.")
        ] = None,
    ) -> None:
        """Measure what every block of a decoding round costs on this machine -> table.json."""
        _run(build(space=space, max_kv=max_kv, max_q=max_q, budget_s=budget_s), flags)


def _run(config: "ProfileConfig", flags: RunFlags) -> None:
    path = config.out / "table.json"
    if path.exists() and not flags.force:
        raise UserError(f"{path} is there already; pass --force to measure again, or another --out")
    from dreams_nas.profiling.run import run_profile

    table = run_profile(config, quiet=flags.quiet)
    _print_summary(table)
    print_json_line({"table": path.as_posix(), **_summary(table)})


def _print_summary(table: "LatencyTable") -> None:
    rows = []
    for block in dict.fromkeys(entry.block for entry in table.entries):
        entries = [entry for entry in table.entries if entry.block == block]
        times = sorted(entry.median_ms for entry in entries)
        rows.append(
            (
                block,
                len(entries),
                max(entry.q for entry in entries),
                max(entry.kv for entry in entries),
                times[0],
                times[-1],
                min(entry.n for entry in entries),
            )
        )
    header = table.header
    print_table(
        ("block", "entries", "max q", "max kv", "least ms", "most ms", "least n"),
        rows,
        f"{header.deployment.key}, torch {header.torch}",
    )
    validation = table.validation or {}
    kinds = ("rounds", "first_rounds", "drafts")
    print_table(
        ("validated with", "cases", "MAPE", "p95", "bias", "within 10 %", "Kendall tau"),
        [
            (
                kind,
                *(
                    validation[kind]["table"][name]
                    for name in ("num_cases", "mape", "p95", "bias", "hit_10", "kendall_tau")
                ),
            )
            for kind in kinds
        ],
    )


def _summary(table: "LatencyTable") -> dict[str, Any]:
    validation = table.validation or {}
    return {
        "hash": table.hash,
        "num_entries": len(table.entries),
        "deployment": table.header.deployment.model_dump(mode="json"),
        "seconds": validation["seconds"],
        "num_unsteady": len(validation["unsteady"]),
        "num_sweeps": validation["num_sweeps"],
        "num_visits": validation["num_visits"],
        "judged_by": validation["rounds"]["judged_by"],
        **{kind: validation[kind]["table"] for kind in ("rounds", "first_rounds", "drafts")},
    }
