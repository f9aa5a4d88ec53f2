"""Trees grown every round by a fixed rule: the likeliest of every level are expanded, the likeliest
of all are verified (EAGLE-2, arXiv 2406.16858). Never looks at a value on the host.

Shapes: C candidates of a level, M candidates of a round, N nodes kept, Q = N + 1 verified rows,
W rows of a draft step, R self-fed rows of a round.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.parts import Parts
from dreams_nas.space.policy import DynamicTree

_LEVEL_MARGIN = 1e-9
"""Taken from a path's score per level, so that a parent always outranks its children, even where
the draft is so sure that the logarithm of its probability is 0."""


@dataclass(frozen=True)
class DynamicPlan:
    """How trees are grown."""

    policy: DynamicTree
    wants_scores: bool = False
    """Whether rounds report how likely the draft held every node."""
    commits_one: bool = False
    """Whether rounds gain one token, whatever is accepted: an answer is drafted from everywhere."""

    @property
    def num_nodes(self) -> int:
        """Most nodes that are verified."""
        return self.policy.num_nodes

    @property
    def num_levels(self) -> int:
        """Longest path."""
        return self.policy.num_levels

    @property
    def num_self_fed(self) -> int:
        """Most self-fed draft rows of a round."""
        return self.policy.num_self_fed

    def describe(self) -> dict[str, Any]:
        """What reports print."""
        return self.policy.describe()


class GrownTree(NamedTuple):
    """One round's tree, nodes ordered by level."""

    tokens_N: Tensor
    """Target ids."""
    parents_N: Tensor
    """Verified row of each node's parent; 0 is the root, node i is row i + 1."""
    depths_Q: Tensor
    """Depth of each verified row."""
    scores_N: Tensor
    """Log-probability of each node's path, by the draft, float64."""


def grow(session: DraftSession, policy: DynamicTree, parts: Parts | None = None) -> GrownTree:
    """Grow a tree below the last committed token.

    Args:
        session: The draft.
        policy: How large it may be.
        parts: Books passes and ranking as steps, and what is decided as tree.
    """
    session.open_round()
    candidates, seen_WR, scores_W = Candidates(), None, None
    for level in range(1, policy.num_levels + 1):
        tokens_WK, likely_WK = session.guess_likely(policy.width)
        scores_WK = likely_WK.double()
        if scores_W is not None:
            scores_WK = scores_WK + scores_W[:, None]
        if parts is not None:
            parts.lap("steps")
        candidates.add(tokens_WK, scores_WK)
        if level == policy.num_levels:
            break
        scores_C = scores_WK.flatten()
        num_rows = min(policy.width, len(scores_C))
        index_W = scores_C.topk(num_rows).indices.sort().values
        candidates.expand(index_W)
        scores_W, rows_W = scores_C[index_W], index_W // tokens_WK.shape[1]
        own_WW = torch.eye(num_rows, dtype=torch.bool, device=rows_W.device)
        seen_WR = own_WW if seen_WR is None else torch.cat([seen_WR[rows_W], own_WW], dim=1)
        if parts is not None:
            parts.lap("tree")
        session.feed(tokens_WK.flatten()[index_W], rows_W, seen_WR)
    session.close_round()
    return candidates.best(policy.num_nodes)


class Candidates:
    """Everything drafted in a round, level by level."""

    def __init__(self) -> None:
        self._tokens: list[Tensor] = []
        self._depths: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._expanded: Tensor | None = None
        """Candidates that the running pass expands; None is the root."""
        self._first = 0

    def add(self, tokens_WK: Tensor, scores_WK: Tensor) -> None:
        """Take a level: guesses of each expanded row."""
        if self._tokens:
            self._first += len(self._tokens[-1])
        tokens_C = tokens_WK.flatten()
        parents_C = torch.full_like(tokens_C, -1)
        if self._expanded is not None:
            parents_C = self._expanded.repeat_interleave(tokens_WK.shape[1])
        self._tokens.append(tokens_C)
        self._depths.append(torch.full_like(tokens_C, len(self._tokens)))
        self._scores.append(scores_WK.flatten())
        self._parents.append(parents_C)

    def expand(self, index_W: Tensor) -> None:
        """Say which of the last level's candidates the next pass expands."""
        self._expanded = index_W + self._first

    def best(self, num_nodes: int) -> GrownTree:
        """The tree of the likeliest of all; closed under parents."""
        margins = [i * _LEVEL_MARGIN for i in range(len(self._scores))]
        ranked_M = torch.cat([s - m for s, m in zip(self._scores, margins, strict=True)])
        index_N = ranked_M.topk(min(num_nodes, len(ranked_M))).indices.sort().values
        parents_N = torch.cat(self._parents)[index_N]
        rows_N = torch.searchsorted(index_N, parents_N.clamp(min=0)) + 1
        depths_N = torch.cat(self._depths)[index_N]
        return GrownTree(
            tokens_N=torch.cat(self._tokens)[index_N],
            parents_N=torch.where(parents_N < 0, 0, rows_N),
            depths_Q=torch.cat([depths_N.new_zeros(1), depths_N]),
            scores_N=torch.cat(self._scores)[index_N],
        )


def ancestry(parents_N: Tensor, num_levels: int) -> Tensor:
    """Which verified rows each row descends from, itself included, bool [Q, Q]."""
    num_rows = len(parents_N) + 1
    row_Q = torch.arange(num_rows, device=parents_N.device)
    up_Q = torch.cat([parents_N.new_zeros(1), parents_N])
    seen_QQ = torch.eye(num_rows, dtype=torch.bool, device=parents_N.device)
    at_Q = row_Q
    for _ in range(num_levels):
        at_Q = up_Q[at_Q]
        seen_QQ[row_Q, at_Q] = True
    return seen_QQ
