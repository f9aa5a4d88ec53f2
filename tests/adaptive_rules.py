"""What adaptive policies decide by, as simple as can be."""

import numpy as np

from dreams_nas.decode.costs import RoundCosts
from dreams_nas.space.policy import Calibration, DynamicTree, LevelCalibration


def calibration(tree: DynamicTree, continuation: float = 0.9) -> Calibration:
    """The draft's own probabilities, taken at their word."""
    knots = np.linspace(-12, 0, 60)
    level = LevelCalibration(
        log_probabilities=tuple(knots.tolist()),
        acceptance=tuple(np.exp(knots).tolist()),
        continuation=continuation,
    )
    return Calibration(tree=tree, levels=(level,), error=0.0, num_rounds=1, tokens_per_round=2.0)


def costs(step_ms: float, row_ms: float, verify_ms: float = 5.0) -> RoundCosts:
    """Steps at a flat price, verification at a price per row on top of a flat one."""
    rows_ms = verify_ms + row_ms * np.arange(64, dtype=np.float64)
    return RoundCosts(
        sync_ms=0.1,
        step_ms=np.full(16, step_ms),
        decide_ms=0.0,
        chain_ms=rows_ms,
        tree_ms=rows_ms,
    )
