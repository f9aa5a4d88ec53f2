"""The four plots of a report, drawn from plain numbers; nothing here reads a file.

Colours are those of Okabe and Ito, which people with colour vision deficiency tell apart; lines and
points differ in shape as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from dreams_nas.bench.arms import PLAIN_NAME
from dreams_nas.core.files import atomic_path

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#B8B8B8"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DPI = 150


@dataclass(frozen=True)
class SearchPoint:
    """One draft of a search; all numbers predicted."""

    key: str
    round_ms: float
    """Mean round, milliseconds."""
    acceptance_length: float
    """Tokens per round."""
    is_on_front: bool
    is_winner: bool


@dataclass(frozen=True)
class Curve:
    """Times against the rows of a pass."""

    label: str
    q: tuple[int, ...]
    median_ms: tuple[float, ...]
    p10_ms: tuple[float, ...] = ()
    p90_ms: tuple[float, ...] = ()


@contextmanager
def _figure(path: Path, width: float = 7.0, height: float = 4.4) -> Iterator[Any]:
    """A figure's axes; saved as PNG, atomically, when the block ends."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    try:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        yield axes
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=_DPI)
    finally:
        pyplot.close(figure)


def plot_pareto(path: Path, points: Sequence[SearchPoint]) -> None:
    """Acceptance length against the cost of a round: the front, the winner, the rest."""
    with _figure(path) as axes:
        rest = [p for p in points if not p.is_on_front]
        front = sorted((p for p in points if p.is_on_front), key=lambda p: p.round_ms)
        axes.scatter(
            [p.round_ms for p in rest],
            [p.acceptance_length for p in rest],
            s=22,
            color=GREY,
            label=f"other drafts ({len(rest)})",
        )
        axes.plot(
            [p.round_ms for p in front],
            [p.acceptance_length for p in front],
            color=COLOURS[0],
            marker="o",
            markersize=5,
            label=f"Pareto front ({len(front)})",
        )
        for point in points:
            if point.is_winner:
                axes.scatter(
                    [point.round_ms],
                    [point.acceptance_length],
                    s=240,
                    marker="*",
                    facecolors="none",
                    edgecolors=COLOURS[1],
                    linewidths=1.6,
                    zorder=3,
                    label=f"winner: {point.key}",
                )
        axes.set_xlabel("predicted round (ms)")
        axes.set_ylabel("acceptance length, replayed (tokens per round)")
        axes.set_title("Drafts of the search, each with its best tree")
        axes.legend(frameon=False, loc="best", fontsize=8)


def plot_latency(path: Path, curves: Sequence[Curve], kv: int) -> None:
    """Times of target and draft passes against their rows, with the tenth to ninetieth percentile
    where it was measured."""
    with _figure(path) as axes:
        for index, curve in enumerate(curves):
            colour = COLOURS[index % len(COLOURS)]
            if len(curve.q) == 1:
                axes.axhline(
                    curve.median_ms[0], color=colour, linestyle="--", label=f"{curve.label}, q = 1"
                )
                continue
            axes.plot(
                curve.q,
                curve.median_ms,
                color=colour,
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
                label=curve.label,
            )
            if curve.p10_ms:
                axes.fill_between(
                    curve.q, curve.p10_ms, curve.p90_ms, color=colour, alpha=0.15, linewidth=0
                )
        axes.set_xlabel("rows of the pass, q")
        axes.set_ylabel("time (ms)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_title(f"Latency table at {kv:,} cached rows")
        axes.legend(frameon=False, fontsize=8)


def plot_acceptance(path: Path, levels: Mapping[str, Sequence[float]]) -> None:
    """Share of rounds that accept each level, per arm."""
    with _figure(path) as axes:
        for index, (name, shares) in enumerate(levels.items()):
            axes.plot(
                range(1, len(shares) + 1),
                [100 * share for share in shares],
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                label=name,
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 100)
        axes.set_xlabel("level of the draft tree")
        axes.set_ylabel("rounds that accept it (%)")
        axes.set_title("Acceptance by level, measured")
        axes.legend(frameon=False)


def plot_speedup(path: Path, arms: Mapping[str, Mapping[str, float]]) -> None:
    """Median speedup of each arm, with the tenth to ninetieth percentile over prompts.

    Args:
        path: Where to.
        arms: {median, p10, p90} by arm; the colours are those of `plot_acceptance`.
    """
    with _figure(path, height=1.6 + 0.6 * len(arms)) as axes:
        names = list(arms)[::-1]
        medians = [arms[name]["median"] for name in names]
        spread = [
            [arms[n]["median"] - arms[n]["p10"] for n in names],
            [arms[n]["p90"] - arms[n]["median"] for n in names],
        ]
        drafting = [name for name in arms if name != PLAIN_NAME]
        colours = [
            COLOURS[drafting.index(n) % len(COLOURS)] if n in drafting else GREY for n in names
        ]
        axes.barh(
            names,
            medians,
            xerr=spread,
            color=colours,
            height=0.6,
            error_kw={"elinewidth": 1.4, "capsize": 4, "ecolor": "#333333"},
        )
        for place, name in enumerate(names):
            axes.annotate(
                f"{arms[name]['median']:.2f}x",
                (arms[name]["p90"], place),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
            )
        axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
        axes.set_xlim(0, 1.12 * max(value["p90"] for value in arms.values()) + 0.15)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("speedup over plain decoding (bar: median, line: p10 to p90 over prompts)")
        axes.set_title("Speedup, measured")
