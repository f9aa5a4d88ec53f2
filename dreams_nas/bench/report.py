"""The verb `report`: one Markdown page with the plots and tables of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreams_nas.bench.artefacts import RunArtefacts, load_artefacts
from dreams_nas.bench.config import ReportConfig
from dreams_nas.bench.plots import (
    Curve,
    SearchPoint,
    plot_acceptance,
    plot_latency,
    plot_pareto,
    plot_speedup,
)
from dreams_nas.core.console import markdown_table, warn
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import atomic_dir, atomic_write_text, require_own_folder
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.table import LatencyEntry, LatencyTable
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree

PAGE = "report.md"
REPORT_FILES = (PAGE, "speedup.png", "acceptance.png", "pareto.png", "latency.png")


def report(config: ReportConfig) -> Path:
    """Write the report of a run folder; returns the page.

    Raises:
        UserError: No such folder, nothing to report in it, or a broken file.
    """
    if not config.run_dir:
        raise UserError("there is no run to report on; give the folder of a run")
    run_dir = Path(config.run_dir)
    return write_report(run_dir, run_dir / "report" if config.out is None else Path(config.out))


def write_report(run_dir: Path, out: Path) -> Path:
    """Write page and plots of whatever the run has finished; the folder appears as a whole.

    Args:
        run_dir: Folder of the run.
        out: Folder to write; an older report there is replaced.

    Returns:
        The page.

    Raises:
        UserError: No such folder, nothing to report in it, or a broken file.
    """
    artefacts = load_artefacts(run_dir)
    require_own_folder(out, REPORT_FILES)
    with atomic_dir(out) as folder:
        parts = [f"# Report of {run_dir.resolve().name}"]
        parts += _bench_part(artefacts, folder)
        parts += _search_part(artefacts, folder)
        parts += _latency_part(artefacts, folder)
        atomic_write_text(folder / PAGE, "\n\n".join(parts) + "\n")
    return out / PAGE


def _image(name: str, alt: str) -> str:
    return f"![{alt}]({name})"


def _bench_part(artefacts: RunArtefacts, folder: Path) -> list[str]:
    bench = artefacts.bench
    if bench is None:
        return ["## Measured", "The bench has not run yet."]
    parts = ["## Measured", "\n".join(f"- {line}" for line in bench["conditions"])]
    parts.append(markdown_table(bench["table"]["headers"], bench["table"]["rows"]))
    parts.append("\n".join(f"- {line}" for line in bench["definitions"]))
    parts += bench["findings"]
    arms = bench["summary"]["arms"]
    if speedups := {n: arm["speedup"] for n, arm in arms.items() if arm["speedup"] is not None}:
        plot_speedup(folder / "speedup.png", speedups)
        parts.append(_image("speedup.png", "Speedup of each arm, median and p10 to p90"))
    levels = {n: arm["acceptance_by_level"] for n, arm in arms.items()}
    if levels := {n: shares for n, shares in levels.items() if shares}:
        plot_acceptance(folder / "acceptance.png", levels)
        parts.append(_image("acceptance.png", "Share of rounds that accept each level"))
    rows = [
        [name, f"{g['min_tokens']}-{g['max_tokens']}", g["num_prompts"], g["speedup"]]
        for name, arm in arms.items()
        if arm["acceptance_by_level"]
        for g in arm["end_to_end"]
    ]
    if rows:
        parts.append("End to end, the target's prefill included, by length of the answer:")
        parts.append(markdown_table(("arm", "answer tokens", "prompts", "speedup"), rows))
    return parts


def _key(arch: dict[str, Any]) -> str:
    return DraftArch(**arch).key


def _search_part(artefacts: RunArtefacts, folder: Path) -> list[str]:
    search = artefacts.search
    if search is None:
        return []
    winner = search["choice"]["winner"]
    winner_key = _key(winner["arch"]) if winner is not None else None
    points = [
        SearchPoint(
            key=_key(e["arch"]),
            round_ms=e["round_ms"],
            acceptance_length=e["acceptance_length"],
            is_on_front=_key(e["arch"]) in artefacts.front_keys,
            is_winner=_key(e["arch"]) == winner_key,
        )
        for e in search["evaluations"]
        if e["tree"]["paths"]
    ]
    parts = ["## Search", f"{len(search['evaluations'])} drafts, all numbers predicted."]
    if winner is None:
        parts.append("No draft pays here: plain decoding is the answer.")
    else:
        parts.append(markdown_table(("winner", "value"), _winner_rows(winner)))
    if points:
        plot_pareto(folder / "pareto.png", points)
        parts.append(_image("pareto.png", "Acceptance length against the cost of a round"))
    if finalists := search["choice"]["finalists"]:
        headers = ("finalist", "speedup predicted", "speedup measured")
        rows = [[_key(f["arch"]), f["speedup_predicted"], f["speedup_measured"]] for f in finalists]
        parts.append(
            "Finalists, decoded on the device before one was named (ratio of sums over prompts of "
            "the *score* split):"
        )
        parts.append(markdown_table(headers, rows))
    if lift := search["lift"]:
        lift_headers = ("choice", "winner", "instead", "speedup predicted", "lift")
        keys = ("dimension", "winner", "baseline", "speedup_predicted", "lift")
        rows = [[_text(r[k]) if k in keys[1:3] else r[k] for k in keys] for r in lift]
        parts.append("What each choice is worth, the others kept (lift above 1: it pays):")
        parts.append(markdown_table(lift_headers, rows))
    return parts


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _winner_rows(winner: dict[str, Any]) -> list[list[Any]]:
    policy = StaticTree(paths=winner["tree"]["paths"]).describe()
    speedup = winner["speedup_predicted"]
    rows: list[list[Any]] = [["key", _key(winner["arch"])]]
    rows += [[name, _text(value)] for name, value in winner["arch"].items()]
    rows += [
        ["policy", f"{policy['kind']}, {policy['levels']} levels, {policy['nodes']} nodes"],
        ["acceptance length, replayed", f"{winner['acceptance_length']:.3f}"],
        ["round, predicted", f"{winner['round_ms']:.3f} ms"],
        [
            "speedup, predicted",
            f"{speedup['median']:.3f} (p10 {speedup['p10']:.3f}, p90 {speedup['p90']:.3f})",
        ],
        ["can be served by", ", ".join(winner["engines"])],
    ]
    return rows


def _latency_part(artefacts: RunArtefacts, folder: Path) -> list[str]:
    table = artefacts.table
    if table is None:
        return []
    kv = _typical_kv(table)
    curves = [
        _measured_curve(table, kv, "target, plain step", "target_step"),
        _measured_curve(table, kv, "target, verify a chain", "verify", mask="chain"),
        _measured_curve(table, kv, "target, verify a tree", "verify", mask="tree"),
        _draft_curve(artefacts, table, kv),
    ]
    plot_latency(folder / "latency.png", [c for c in curves if c is not None and c.q], kv)
    header = table.header
    return [
        "## Latency table",
        f"- {header.deployment.key}\n- {len(table.entries)} entries, hash `{table.hash}`, measured "
        f"{header.date or 'at an unknown time'}",
        _image("latency.png", "Time of target and draft passes against their rows"),
    ]


def _typical_kv(table: LatencyTable) -> int:
    """The middle one of the cache lengths that verify was measured at."""
    kvs = sorted({e.kv for e in table.entries if e.block == "verify"})
    return kvs[len(kvs) // 2] if kvs else 0


def _measured_curve(
    table: LatencyTable, kv: int, label: str, block: str, **dims: str
) -> Curve | None:
    """The entries of a block at the measured cache length nearest to `kv`."""
    entries = [e for e in table.entries if e.block == block and e.dims == dims]
    if not entries:
        return None
    nearest = min({e.kv for e in entries}, key=lambda other: abs(other - kv))
    chosen: Sequence[LatencyEntry] = sorted(
        (e for e in entries if e.kv == nearest), key=lambda e: e.q
    )
    return Curve(
        label=label,
        q=tuple(e.q for e in chosen),
        median_ms=tuple(e.median_ms for e in chosen),
        p10_ms=tuple(e.p10_ms for e in chosen),
        p90_ms=tuple(e.p90_ms for e in chosen),
    )


def _draft_curve(artefacts: RunArtefacts, table: LatencyTable, kv: int) -> Curve | None:
    """A self-fed step of the winner: a sum of blocks, so without a spread of its own."""
    arch, dims = artefacts.winner_arch, artefacts.dims
    if arch is None or dims is None:
        return None
    try:
        costs = CostModel(table, arch, dims)
        q = [e.q for e in table.entries if e.block == "draft_fixed"]
        rows = np.array(sorted({n for n in q if n <= costs.max_step_rows}))
        step_ms = costs.t_step(rows, kv)
    except UserError as error:
        warn(f"the winner's draft step is not drawn: {error}")
        return None
    return Curve(
        label="winner, draft step (sum of blocks)",
        q=tuple(int(n) for n in rows),
        median_ms=tuple(float(ms) for ms in step_ms),
    )
