"""Predicted rounds and speedups: a walk priced by a latency table, round by round.

Shapes: P prompts, N rounds of all prompts, T plain steps of all prompts.
"""

from dataclasses import dataclass

import numpy as np

from dreams_nas.core.config import Config
from dreams_nas.core.errors import UserError
from dreams_nas.latency.cost import CostModel, mask_kind
from dreams_nas.latency.grid import FloatArray
from dreams_nas.space.rank_paths import IntArray
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import Walk


class SpeedupSummary(Config):
    """Plain time / speculative time over prompts."""

    median: float
    """Median over prompts."""
    p10: float
    """Tenth percentile over prompts."""
    p90: float
    """Ninetieth percentile over prompts."""
    ratio_of_sums: float
    """Plain time of all prompts / speculative time of all prompts; what search maximises."""
    num_prompts: int
    """Prompts with at least one token to decode."""

    def quantiles(self) -> dict[str, float]:
        """{median, p10, p90}, as reports print them."""
        return {"median": self.median, "p10": self.p10, "p90": self.p90}


@dataclass(frozen=True)
class Prediction:
    """Predicted times of prompts; the target's prefill is in neither arm."""

    plain_ms_P: FloatArray
    """Plain decoding of each prompt with something to decode."""
    speculative_ms_P: FloatArray
    """Its draft prefill and all its rounds."""
    round_ms_N: FloatArray
    """Each round."""

    @property
    def summary(self) -> SpeedupSummary:
        """Median, percentiles and ratio of sums over prompts."""
        ratio_P = self.plain_ms_P / self.speculative_ms_P
        p10, median, p90 = (float(value) for value in np.percentile(ratio_P, (10, 50, 90)))
        total = float(self.plain_ms_P.sum() / self.speculative_ms_P.sum())
        return SpeedupSummary(
            median=median, p10=p10, p90=p90, ratio_of_sums=total, num_prompts=len(ratio_P)
        )


def predict_round_ms(costs: CostModel, tree: StaticTree, walk: Walk) -> FloatArray:
    """Milliseconds of each round, [N]; the first of a prompt has no sync (see draft prefill)."""
    target_kv_N = walk.prompt_lengths_P[walk.prompt_N] + walk.root_N
    if not tree.paths:
        return costs.t_ar(target_kv_N)
    num_rows = tree.num_nodes + 1
    mask = mask_kind(tree)
    round_ms_N = costs.t_verify(num_rows, target_kv_N, mask)
    round_ms_N = round_ms_N + costs.t_tree(num_rows, mask) + costs.t_commit(num_rows, mask)
    draft_kv_N = walk.kept_rows_P[walk.prompt_N] + walk.root_N
    num_self_fed = 0
    for width in tree.step_widths:
        round_ms_N = round_ms_N + costs.t_step(width, draft_kv_N + num_self_fed)
        num_self_fed += width
    later_N = np.flatnonzero(~walk.is_first_N)
    # Committed since the round before: what it accepted, and its bonus token.
    num_new_N = walk.root_N[later_N] - walk.root_N[later_N - 1]
    round_ms_N[later_N] += costs.t_sync(num_new_N, draft_kv_N[later_N] - num_new_N)
    return round_ms_N


def predict_plain_ms(
    costs: CostModel, prompt_lengths_P: IntArray, answer_lengths_P: IntArray
) -> FloatArray:
    """Milliseconds of plain decoding of each prompt, each token at its own kv, [P]."""
    num_steps_P = np.maximum(answer_lengths_P - 1, 0)
    prompt_T = np.repeat(np.arange(len(num_steps_P)), num_steps_P)
    start_P = np.cumsum(num_steps_P) - num_steps_P
    kv_T = prompt_lengths_P[prompt_T] + np.arange(len(prompt_T)) - start_P[prompt_T]
    return _sum_by(prompt_T, costs.t_ar(kv_T), len(num_steps_P))


def predict_speedup(costs: CostModel, tree: StaticTree, walk: Walk) -> Prediction:
    """Price a walk: sum of tokens * t_ar(kv) / (t_draft_prefill(kept rows) + its rounds).

    A tree without nodes is plain decoding: both arms cost the same, no draft is loaded.
    Prompts whose answer ends with the token from prefill have nothing to decode and are left out.

    Raises:
        UserError: No prompt has anything to decode, or a size outside the measured range.
    """
    has_rounds_P = walk.answer_lengths_P > 1
    if not has_rounds_P.any():
        raise UserError(
            f"none of {len(has_rounds_P)} prompts has an answer of two tokens or more, so there "
            "is nothing to decode; collect longer answers"
        )
    round_ms_N = predict_round_ms(costs, tree, walk)
    plain_ms_P = predict_plain_ms(costs, walk.prompt_lengths_P, walk.answer_lengths_P)
    num_prompts = len(has_rounds_P)
    rounds_ms_P = _sum_by(walk.prompt_N, round_ms_N, num_prompts)
    plain_ms_P, rounds_ms_P = plain_ms_P[has_rounds_P], rounds_ms_P[has_rounds_P]
    if not tree.paths:
        return Prediction(plain_ms_P, plain_ms_P, round_ms_N)
    prefill_ms_P = costs.t_draft_prefill(walk.kept_rows_P[has_rounds_P])
    return Prediction(plain_ms_P, prefill_ms_P + rounds_ms_P, round_ms_N)


def _sum_by(group: IntArray, values: FloatArray, num_groups: int) -> FloatArray:
    sums: FloatArray = np.bincount(group, weights=values, minlength=num_groups).astype(np.float64)
    return sums
