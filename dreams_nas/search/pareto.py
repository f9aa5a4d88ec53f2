"""Non-dominated points: no other is at least as good in everything and better in something."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dreams_nas.search.objective import Evaluation


def non_dominated(costs: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Mark the points that no other dominates; equal points stand together.

    Args:
        costs: [points, objectives], all to be minimised; negate what should be large.

    Returns:
        True for each point on the front, [points].
    """
    values = np.asarray(costs, dtype=np.float64)
    if values.size == 0:
        return np.zeros(len(values), dtype=np.bool_)
    assert not np.isnan(values).any(), "a point without a value cannot be compared"
    front = np.zeros(len(values), dtype=np.bool_)
    for i, point in enumerate(values):
        no_worse = (values <= point).all(axis=1)
        front[i] = not (no_worse & (values < point).any(axis=1)).any()
    return front


def pareto_front(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Drafts that speculate, acceptance length against the cost of a round, cheapest first."""
    candidates = [e for e in evaluations if e.speculates]
    front = non_dominated([(-e.acceptance_length, e.round_ms) for e in candidates])
    chosen = [e for e, is_on in zip(candidates, front, strict=True) if is_on]
    return sorted(chosen, key=lambda e: (e.round_ms, e.arch.key))
