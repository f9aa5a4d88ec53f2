"""Naming the winner: finalists are decoded on the device first; lift of each of its choices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dreams_nas.core.config import Config
from dreams_nas.search.objective import Evaluation, Objective
from dreams_nas.space.arch import NAMED_ARCHS, DraftArch, TargetDims
from dreams_nas.space.search_space import DIMENSIONS, SearchSpace

MeasureFinalists = Callable[[list[Evaluation]], list[float]]
"""Decodes finalists on the device: measured plain time / speculative time of each."""


class Finalist(Config):
    """A draft that was decoded on the device."""

    arch: DraftArch
    """The draft."""
    speedup_predicted: float
    """Ratio of sums that the table predicts."""
    speedup_measured: float
    """Ratio that was measured."""


class WinnerChoice(Config):
    """The answer of a search."""

    winner: Evaluation | None
    """The draft to use; null means: do not speculate."""
    finalists: tuple[Finalist, ...]
    """What was decoded before, best predicted first; empty when nothing was predicted to pay."""


def choose_winner(
    evaluations: Sequence[Evaluation], measure_finalists: MeasureFinalists, num_finalists: int = 3
) -> WinnerChoice:
    """Decode the best predicted drafts and name the fastest of them.

    Only drafts that speculate and are predicted to beat plain decoding become finalists; if none
    is, or none is measured to, the answer is "do not speculate".

    Args:
        evaluations: Of the search, each draft once.
        measure_finalists: Decodes them on the device.
        num_finalists: Drafts decoded.
    """
    paying = [e for e in evaluations if e.speculates and e.speedup > 1.0]
    best = sorted(paying, key=lambda e: (-e.speedup, e.arch.key))[:num_finalists]
    if not best:
        return WinnerChoice(winner=None, finalists=())
    measured = measure_finalists(best)
    assert len(measured) == len(best), "one measured ratio per finalist"
    finalists = tuple(
        Finalist(arch=e.arch, speedup_predicted=e.speedup, speedup_measured=ratio)
        for e, ratio in zip(best, measured, strict=True)
    )
    fastest = max(range(len(best)), key=lambda i: measured[i])
    winner = best[fastest] if measured[fastest] > 1.0 else None
    return WinnerChoice(winner=winner, finalists=finalists)


class Lift(Config):
    """What one choice of the winner is worth, all others kept; predicted."""

    dimension: str
    """The dimension that is changed back, or "tree"."""
    winner: Any
    """The winner's choice."""
    baseline: Any
    """What it is changed back to."""
    speedup_predicted: float
    """Ratio of sums with the baseline's choice, its best tree inside."""
    lift: float
    """Winner's predicted speedup / that one: above 1 the choice pays."""


def decompose_lift(
    winner: Evaluation,
    space: SearchSpace,
    dims: TargetDims,
    evaluate: Objective,
    *,
    evaluate_chain: Objective | None = None,
    known: Mapping[str, Evaluation] | None = None,
) -> list[Lift]:
    """Change one choice of the winner at a time back to the baseline's.

    The baseline is `eagle3`'s choice where the space has it, else the space's largest. Choices that
    the winner shares with it have no row. The tree's row compares with the best chain.

    Args:
        winner: The winner.
        space: Where it was found.
        dims: The target.
        evaluate: Prices a draft that was not evaluated before.
        evaluate_chain: Prices a draft with its best chain; None leaves the tree's row out.
        known: Evaluations by draft key.
    """
    rows = []
    if evaluate_chain is not None and not winner.tree.is_chain:
        chain = evaluate_chain(winner.arch)
        rows.append(_lift("tree", winner, "static_tree", "chain", chain))
    baseline, largest = NAMED_ARCHS["eagle3"], space.largest()
    for name in DIMENSIONS:
        ours, choices = getattr(winner.arch, name), space.choices(name)
        theirs = getattr(baseline, name)
        theirs = theirs if theirs in choices else getattr(largest, name)
        other = space.canonical(winner.arch.replace(**{name: theirs}), dims)
        if other == space.canonical(winner.arch, dims):
            continue
        evaluation = (known or {}).get(other.key) or evaluate(other)
        rows.append(_lift(name, winner, ours, theirs, evaluation))
    return rows


def _lift(name: str, winner: Evaluation, ours: Any, theirs: Any, other: Evaluation) -> Lift:
    return Lift(
        dimension=name,
        winner=ours,
        baseline=theirs,
        speedup_predicted=other.speedup,
        lift=winner.speedup / other.speedup,
    )
