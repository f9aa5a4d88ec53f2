"""How good predictions are: errors, hits, and whether they rank as the measurements do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dreams_nas.latency.grid import FloatArray


def error_report(
    predicted: Sequence[float], measured: Sequence[float], groups: Sequence[int]
) -> dict[str, float | int | None]:
    """Errors of predicted times, as shares of the measured ones.

    Args:
        predicted: Milliseconds.
        measured: Milliseconds, of the same things.
        groups: Depth of each, to rank among equals.

    Returns:
        `mape`, `p95` (of absolute errors), `bias` (mean signed error), `hit_10` and `hit_15`
        (shares within 10 and 15 percent), `kendall_tau`, `kendall_tau_equal_depth`, `num_cases`.
        The taus are null where no two cases can be ranked.
    """
    error = np.asarray(predicted) / np.asarray(measured) - 1.0
    absolute = np.abs(error)
    return {
        "mape": float(absolute.mean()),
        "p95": float(np.percentile(absolute, 95)),
        "bias": float(error.mean()),
        "hit_10": float((absolute <= 0.10).mean()),
        "hit_15": float((absolute <= 0.15).mean()),
        "kendall_tau": kendall_tau(predicted, measured),
        "kendall_tau_equal_depth": kendall_tau(predicted, measured, groups),
        "num_cases": len(error),
    }


def kendall_tau(
    first: Sequence[float], second: Sequence[float], groups: Sequence[int] | None = None
) -> float | None:
    """Kendall's tau-b: 1 for the same order, -1 for the reverse, 0 for a constant.

    Args:
        first: One value per case.
        second: The other.
        groups: Only pairs within a group count; None for all pairs.

    Returns:
        The correlation; None where no pair differs in the second value.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    i, j = np.triu_indices(len(a), k=1)
    if groups is not None:
        group = np.asarray(groups)
        same = group[i] == group[j]
        i, j = i[same], j[same]
    order_a, order_b = np.sign(a[i] - a[j]), np.sign(b[i] - b[j])
    num_a, num_b = int(np.abs(order_a).sum()), int(np.abs(order_b).sum())
    if not num_b:
        return None
    return float((order_a * order_b).sum() / np.sqrt(num_a * num_b)) if num_a else 0.0


def fit_line(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> FloatArray:
    """Least-squares prediction of y from x with an intercept, at the same points."""
    columns = np.stack([np.ones(len(x)), np.asarray(x, dtype=np.float64)], axis=1)
    solution = np.linalg.lstsq(columns, np.asarray(y, dtype=np.float64), rcond=None)[0]
    return np.asarray(columns @ solution)
