"""Whole rounds through the decoder itself, with as many drafted tokens accepted as we say.

A draft with random weights is hardly ever right, so that its rounds would all be rejections. Here
the target is bent instead: at the rows of the chosen path its logits point at the drafted tokens,
and after the last of them at a token that no child drafted. All else is the engine's own: what is
timed is `decode`, not a copy of it.

Shapes: Q verified rows, V vocabulary, A accepted nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreams_nas.decode.drafting import ReadyDraft
from dreams_nas.decode.engine import build_plan, decode
from dreams_nas.decode.plan import TreePlan
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.grid import FloatArray
from dreams_nas.latency.predict import predict_round_ms
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import Walk
from dreams_nas.targets.protocol import Target, TargetInputs, VerifyOutput


def path_rows(plan: TreePlan, num_accepted: int) -> list[int]:
    """Verified rows of a path of that many nodes: at each node the best guess that goes on.

    The path branches off where it can, so that committing it moves rows, as it mostly does.
    """
    depth_left = _depth_below(plan)
    rows = [0]
    while len(rows) <= num_accepted:
        wanted = num_accepted - len(rows)
        able = [row for row in plan.children[rows[-1]] if depth_left[row] >= wanted]
        assert able, f"the tree has no path of {num_accepted} nodes"
        rows.append(able[0])
    return rows


def _depth_below(plan: TreePlan) -> list[int]:
    """Levels below each verified row."""
    depth = [0] * len(plan.children)
    for row in reversed(range(len(plan.children))):
        depth[row] = max((1 + depth[child] for child in plan.children[row]), default=0)
    return depth


class ForcedTarget:
    """A target whose verification accepts a given number of nodes, round after round."""

    def __init__(self, target: Target, plan: TreePlan, accepted: Sequence[int]) -> None:
        """Wrap a target.

        Args:
            target: The real one; everything but the accepted rows' argmax is its.
            plan: The tree that will be drafted.
            accepted: Nodes to accept in each round.
        """
        self._target = target
        self._accepted = list(accepted)
        self._round = 0
        self._forced: dict[int, tuple[Tensor, Tensor]] = {}
        for count in set(accepted):
            rows = torch.tensor(path_rows(plan, count), device=target.device)
            self._forced[count] = rows[:-1], rows[1:]

    def __getattr__(self, name: str) -> Any:
        """Everything else is the target's own."""
        return getattr(self._target, name)

    def verify(self, tokens_Q: Tensor, *args: Any, **kwargs: Any) -> VerifyOutput:
        """Run the target; then let its logits say what they are to say."""
        out = self._target.verify(tokens_Q, *args, **kwargs)
        count = self._accepted[self._round]
        self._round += 1
        parents_A, children_A = self._forced[count]
        # The last row keeps its own logits: that they name a drafted token is next to impossible
        # with random weights, and the round would say so.
        if count:
            out.logits_QV[parents_A, tokens_Q[children_A]] = torch.inf
        return out


@dataclass(frozen=True)
class RoundTimes:
    """Measured rounds of one draft and tree, and the walk that they are."""

    walk: Walk
    """One prompt; its rounds in order."""
    round_ms_N: FloatArray
    """Each round; the first includes the draft's prefill."""


def measure_rounds(
    target: Target,
    draft: ReadyDraft,
    tree: StaticTree,
    inputs: TargetInputs,
    accepted: Sequence[int],
) -> RoundTimes:
    """Decode one prompt with forced acceptance and read the engine's own clock.

    Args:
        target: The real target.
        draft: Of any weights.
        tree: At least one node.
        inputs: The prompt.
        accepted: Nodes to accept in each round; its length is the number of rounds.
    """
    plan = build_plan(tree, target)
    assert plan is not None, "rounds are measured with a tree of at least one node"
    num_tokens = 1 + sum(count + 1 for count in accepted)
    forced: Any = ForcedTarget(target, plan, accepted)
    result = decode(forced, inputs, max_new_tokens=num_tokens, draft=draft, plan=plan, stop_ids=())
    accepted_N = np.array([one.num_accepted for one in result.rounds], dtype=np.int64)
    length = len(inputs.input_ids_T)
    return RoundTimes(
        walk=Walk(
            prompt_N=np.zeros(len(accepted_N), dtype=np.int64),
            root_N=np.concatenate([[0], np.cumsum(accepted_N + 1)[:-1]]).astype(np.int64),
            accepted_N=accepted_N,
            answer_lengths_P=np.array([num_tokens]),
            prompt_lengths_P=np.array([length]),
            kept_rows_P=np.array([length]),
        ),
        round_ms_N=np.array([one.seconds * 1000.0 for one in result.rounds]),
    )


def predict_rounds(costs: CostModel, tree: StaticTree, walk: Walk) -> FloatArray:
    """The table's milliseconds of the same rounds; the first includes the draft's prefill."""
    round_ms_N = np.array(predict_round_ms(costs, tree, walk), dtype=np.float64)
    round_ms_N[walk.is_first_N] += costs.t_draft_prefill(walk.kept_rows_P)
    return round_ms_N
