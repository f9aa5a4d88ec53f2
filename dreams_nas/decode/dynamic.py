"""Trees that are grown every round: what is expanded, what is kept, how it is verified.

Shapes: C candidates of a level, M candidates of a round, N nodes kept, Q = N + 1 verified rows,
W rows of a draft step.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dreams_nas.space.policy import DynamicTree

_LEVEL_MARGIN = 1e-9
"""Taken from a path's score per level, so that a parent always outranks its children, even where
the draft is so sure that the logarithm of its probability is 0."""


class Director(Protocol):
    """Decides about one request's trees; asked once per level, then once what to keep."""

    def expand(self, candidates: "Candidates") -> Tensor | None:
        """Which of the last level's candidates are expanded, ascending; None: no further level."""

    def keep(self, candidates: "Candidates") -> Tensor:
        """Which of all candidates are verified, ascending; closed under parents."""

    def observe(self, num_tokens: int) -> None:
        """Learn what the round gained, the bonus token included."""


class LikeliestPaths:
    """The fixed rule: the best of every level are expanded, the best of all are kept.

    Never looks at a value on the host.
    """

    def __init__(self, policy: DynamicTree) -> None:
        self._policy = policy

    def expand(self, candidates: "Candidates") -> Tensor | None:
        """See `Director.expand`."""
        scores_C = candidates.last_scores_C
        if candidates.num_levels == self._policy.num_levels:
            return None
        num_rows = min(self._policy.width, len(scores_C))
        return scores_C.topk(num_rows).indices.sort().values

    def keep(self, candidates: "Candidates") -> Tensor:
        """See `Director.keep`."""
        scores_M = candidates.ranked_scores_M
        num_nodes = min(self._policy.num_nodes, len(scores_M))
        return scores_M.topk(num_nodes).indices.sort().values

    def observe(self, num_tokens: int) -> None:
        """Nothing to learn."""


class GrownTree(NamedTuple):
    """One round's tree, nodes ordered by level."""

    tokens_N: Tensor
    """Target ids."""
    parents_N: Tensor
    """Verified row of each node's parent; 0 is the root, node i is row i + 1."""
    depths_Q: Tensor
    """Depth of each verified row."""
    scores_N: Tensor
    """Log-probability of each node's path, by the draft."""


class Candidates:
    """Everything drafted in a round, level by level."""

    def __init__(self, device: torch.device) -> None:
        self._tokens: list[Tensor] = []
        self._depths: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._expanded = torch.full((1,), -1, device=device)
        """Candidates that the running pass expands; -1 is the root."""
        self._first = 0

    @property
    def num_levels(self) -> int:
        """Levels so far."""
        return len(self._tokens)

    @property
    def last_scores_C(self) -> Tensor:
        """Log-probabilities of the last level's paths, float64."""
        return self._scores[-1]

    @property
    def last_parents_C(self) -> Tensor:
        """Parents of the last level's candidates among all; -1 is the root."""
        return self._parents[-1]

    def add(self, tokens_C: Tensor, scores_C: Tensor, num_guesses: int) -> None:
        """Take a level: `num_guesses` of each expanded row, row by row."""
        if self._tokens:
            self._first += len(self._tokens[-1])
        self._tokens.append(tokens_C)
        self._depths.append(torch.full_like(tokens_C, len(self._tokens)))
        self._scores.append(scores_C)
        self._parents.append(self._expanded.repeat_interleave(num_guesses))

    def expand(self, index_W: Tensor) -> None:
        """Say which of the last level's candidates the next pass expands."""
        self._expanded = index_W + self._first

    @property
    def ranked_scores_M(self) -> Tensor:
        """Scores of all, a parent always above its children."""
        levels = [i * _LEVEL_MARGIN for i in range(self.num_levels)]
        parts = zip(self._scores, levels, strict=True)
        return torch.cat([scores_C - margin for scores_C, margin in parts])

    def take(self, index_N: Tensor) -> GrownTree:
        """The tree of some candidates, ascending and closed under parents."""
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


@dataclass(frozen=True)
class DynamicPlan:
    """How trees are grown: the bounds, and whose rule decides within them."""

    policy: DynamicTree
    rule: "DirectorFactory"
    name: str = "dynamic_tree"
    """What reports call it."""
    wants_scores: bool = False
    """Whether rounds report how likely the draft held every node."""

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
        return {**self.policy.describe(), "kind": self.name}


class DirectorFactory(Protocol):
    """Makes the director of a request."""

    def __call__(self, policy: DynamicTree) -> Director:
        """A director that has seen nothing yet."""


def dynamic_plan(policy: DynamicTree) -> DynamicPlan:
    """The plan of a dynamic tree by the fixed rule."""
    return DynamicPlan(policy, LikeliestPaths)
