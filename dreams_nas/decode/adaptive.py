"""How much to speculate, decided every round from measured costs and calibrated probabilities.

At a rate of r tokens per millisecond a millisecond is worth r tokens: a draft step is taken while
the tokens it should gain outweigh its time, and a node is verified while its probability outweighs
the time that it adds (design, section 10). Decisions read one transfer per level and depend on
nothing but the draft's scores, so that an answer always takes the same rounds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreams_nas.decode.dynamic import Candidates, DynamicPlan
from dreams_nas.space.policy import Calibration, DynamicTree

Floats = np.ndarray[Any, np.dtype[np.float64]]
_PRIOR_ROUNDS = 4
"""Weight of the first guess of the rate, in rounds."""
_PRIOR_TOKENS = 2.0
"""Tokens per round before anything was observed."""


@dataclass(frozen=True)
class RoundCosts:
    """What the parts of a round cost on a deployment, milliseconds."""

    sync_ms: float
    """The draft commits the tokens of a round."""
    step_ms: Floats
    """A self-fed draft step of 1, 2, ... rows."""
    verify_ms: Floats
    """Verifying 1, 2, ... rows, joining, accepting and committing included."""


class Economist:
    """The adaptive rule for one request."""

    def __init__(self, policy: DynamicTree, calibration: Calibration, costs: RoundCosts) -> None:
        self._policy, self._calibration, self._costs = policy, calibration, costs
        self._tokens = _PRIOR_ROUNDS * _PRIOR_TOKENS
        typical_ms = costs.sync_ms + float(costs.step_ms[0]) + float(costs.verify_ms[1])
        self._ms = _PRIOR_ROUNDS * typical_ms
        self._round_ms = costs.sync_ms
        self._likely: list[Floats] = []
        room = len(costs.verify_ms)
        self._node_ms = float(costs.verify_ms[-1] - costs.verify_ms[0]) / max(1, room - 1)

    @property
    def rate(self) -> float:
        """Tokens per millisecond so far."""
        return self._tokens / self._ms

    def expand(self, candidates: Candidates) -> Tensor | None:
        """Expand as many of the likeliest paths as pay; see `Director.expand`."""
        level, scores_C = candidates.num_levels, candidates.last_scores_C
        host = torch.cat([scores_C, candidates.last_parents_C.to(scores_C.dtype)]).tolist()
        parent_C = np.asarray(host[len(scores_C) :], dtype=np.int64)
        likely_C = self._calibration.acceptance(level, np.asarray(host[: len(scores_C)]))
        if level == 1:
            self._likely = [likely_C]
        else:  # fitted apart, a level's map may lie above that of the parents
            likely_C = np.minimum(likely_C, np.concatenate(self._likely)[parent_C])
            self._likely.append(likely_C)
        if level == self._policy.num_levels:
            return None
        most = min(self._policy.width, len(self._costs.step_ms))
        order_W = np.argsort(-likely_C, kind="stable")[:most]
        going_on = self._calibration.levels[min(level, len(self._calibration.levels)) - 1]
        gain_W = likely_C[order_W].cumsum() * going_on.continuation
        num_nodes_W = np.arange(1, len(order_W) + 1)
        cost_W = self._costs.step_ms[: len(order_W)] + num_nodes_W * self._node_ms
        value_W = gain_W - self.rate * cost_W
        best = int(value_W.argmax())
        if value_W[best] <= 0:
            return None
        self._round_ms += float(self._costs.step_ms[best])
        return torch.as_tensor(np.sort(order_W[: best + 1]), device=scores_C.device)

    def keep(self, candidates: Candidates) -> Tensor:
        """Keep the likeliest nodes while one more gains more than it costs; see `Director`."""
        likely_M = np.concatenate(self._likely)
        order_M = np.argsort(-likely_M, kind="stable")  # earlier levels first among equals
        most = min(self._policy.num_nodes, len(self._costs.verify_ms) - 1, len(order_M))
        gain_n = np.concatenate([[0.0], likely_M[order_M[:most]].cumsum()])
        best = int((gain_n - self.rate * self._costs.verify_ms[: most + 1]).argmax())
        self._round_ms += float(self._costs.verify_ms[best])
        return torch.as_tensor(
            np.sort(order_M[:best]), dtype=torch.int64, device=candidates.last_scores_C.device
        )

    def observe(self, num_tokens: int) -> None:
        """Book the round's tokens and what it should have cost."""
        self._tokens += num_tokens
        self._ms += self._round_ms
        self._round_ms = self._costs.sync_ms


def adaptive_plan(calibration: Calibration, costs: RoundCosts) -> DynamicPlan:
    """The plan that decides from a draft's calibration and a deployment's costs."""
    return DynamicPlan(
        calibration.tree, lambda policy: Economist(policy, calibration, costs), "adaptive"
    )
