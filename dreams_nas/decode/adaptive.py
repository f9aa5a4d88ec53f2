"""How much to speculate, decided every round from measured costs and calibrated probabilities.

At a rate of r tokens per millisecond a millisecond is worth r tokens: a draft step is taken while
the tokens it should gain outweigh its time, and nodes are verified while their probability
outweighs the time that they add (design, section 10). What is decided depends on nothing but the
draft's scores and the tokens gained, so that an answer always takes the same rounds.

Each level reads the draft's best guesses on the host, one small transfer; the tree is grown there,
as plain numbers. It needs no other transfer but that of the target's choices.

Shapes: W rows of a draft step, K guesses of each, Q verified rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dreams_nas.decode.costs import RoundCosts
from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.parts import Parts
from dreams_nas.space.policy import Calibration

_PRIOR_ROUNDS = 4
"""Weight of the first guess of the rate, in rounds."""


@dataclass(frozen=True)
class AdaptivePlan:
    """What an adaptive policy decides by."""

    calibration: Calibration
    costs: RoundCosts

    @property
    def num_nodes(self) -> int:
        """Most nodes that are verified."""
        return self.calibration.tree.num_nodes

    @property
    def num_levels(self) -> int:
        """Longest path."""
        return self.calibration.tree.num_levels

    @property
    def num_self_fed(self) -> int:
        """Most self-fed draft rows of a round."""
        return self.calibration.tree.num_self_fed

    def describe(self) -> dict[str, Any]:
        """What reports print."""
        return {**self.calibration.tree.describe(), "kind": "adaptive"}


@dataclass
class HostTree:
    """One round's tree as plain numbers, nodes ordered by level."""

    tokens: list[int] = field(default_factory=list)
    """Target ids."""
    parents: list[int] = field(default_factory=list)
    """Verified row of each node's parent; 0 is the root, node i is row i + 1."""
    scores: list[float] = field(default_factory=list)
    """Log-probability of each node's path, by the draft."""

    @property
    def is_chain(self) -> bool:
        """Whether every node has the one before as its parent."""
        return self.parents == list(range(len(self.parents)))

    def depths(self) -> list[int]:
        """Depth of each verified row; the root is 0."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return found

    def visible(self) -> list[list[bool]]:
        """Which verified rows each row descends from, itself included."""
        num_rows = len(self.parents) + 1
        seen = [[True] + [False] * (num_rows - 1)]
        for row, parent in enumerate(self.parents, 1):
            seen.append(seen[parent].copy())
            seen[row][row] = True
        return seen


class Economist:
    """The adaptive rule for one request: what is expanded, what is verified.

    Candidates of a round are numbered in the order they were drafted, level by level; -1 is the
    root.
    """

    def __init__(self, plan: AdaptivePlan) -> None:
        costs, calibration = plan.costs, plan.calibration
        self._policy, self._calibration = calibration.tree, calibration
        self._sync_ms, self._step_ms = costs.sync_ms, costs.step_ms.tolist()
        self._chain_ms, self._tree_ms = costs.chain_ms.tolist(), costs.tree_ms.tolist()
        self._node_ms = (self._chain_ms[-1] - self._chain_ms[1]) / max(1, len(self._chain_ms) - 2)
        num_tokens = calibration.tokens_per_round
        num_nodes = min(len(self._chain_ms) - 1, round(num_tokens))
        first_ms = costs.sync_ms + (num_nodes - 1) * self._step_ms[0] + self._chain_ms[num_nodes]
        self._tokens, self._ms = _PRIOR_ROUNDS * num_tokens, _PRIOR_ROUNDS * first_ms
        self.open_round()

    @property
    def rate(self) -> float:
        """Tokens per millisecond so far; plain decoding is always to be had."""
        return max(self._tokens / self._ms, 1 / self._chain_ms[0])

    def open_round(self) -> None:
        """Forget the last round's candidates."""
        self._drafted: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._likely: list[float] = []
        self._fed = [-1]
        """Candidates that the running pass expands."""
        self._first, self._level = 0, 0
        self._round_ms = self._sync_ms

    def look(self, tokens_WK: Sequence[Sequence[int]], logs_WK: Sequence[Sequence[float]]) -> None:
        """Take the best guesses of the running pass's rows, and how likely the draft holds them."""
        self._first = len(self._drafted)
        self._level += 1
        fitted = self._calibration.level(self._level)
        for parent, tokens, logs in zip(self._fed, tokens_WK, logs_WK, strict=True):
            score, most = (
                (self._scores[parent], self._likely[parent]) if parent >= 0 else (0.0, 1.0)
            )
            for token, log in zip(tokens, logs, strict=True):
                self._drafted.append(token)
                self._parents.append(parent)
                self._scores.append(score + log)
                # Fitted apart, a level's map may lie above that of the parents.
                self._likely.append(min(most, fitted.accepted(score + log)))

    @property
    def num_guesses(self) -> int:
        """Best guesses wanted of every row."""
        return self._policy.width

    def expand(self) -> tuple[list[int], list[int]]:
        """Which guesses of the last pass are fed back, none when drafting no longer pays.

        Returns:
            Their places among the pass's guesses, row by row, ascending; and the row of each.
        """
        if self._level == self._policy.num_levels:
            return [], []
        last = range(self._first, len(self._drafted))
        order = sorted(last, key=self._likely.__getitem__, reverse=True)
        going_on = self._calibration.level(self._level).continuation
        best, best_value, gain, rate = 0, 0.0, 0.0, self.rate
        for width in range(1, min(self._policy.width, len(self._step_ms), len(order)) + 1):
            gain += going_on * self._likely[order[width - 1]]
            value = gain - rate * (self._step_ms[width - 1] + width * self._node_ms)
            if value > best_value:
                best, best_value = width, value
        if best:
            self._round_ms += self._step_ms[best - 1]
        num_guesses = len(last) // len(self._fed)
        self._fed = sorted(order[:best])
        places = [candidate - self._first for candidate in self._fed]
        return places, [place // num_guesses for place in places]

    def harvest(self) -> HostTree:
        """What is verified: nodes are added, the likeliest first, while they pay."""
        order = sorted(range(len(self._drafted)), key=self._likely.__getitem__, reverse=True)
        spine = [-1]
        for candidate, parent in enumerate(self._parents):
            if parent == spine[-1]:  # the first of a row is its best
                spine.append(candidate)
        best: list[int] = []
        best_value = -self.rate * self._chain_ms[0]
        best_ms = self._chain_ms[0]
        for line in (spine[1:], order):
            gain, is_chain, before = 0.0, True, -1
            most = min(self._policy.num_nodes, len(line))
            for count, candidate in enumerate(line[:most], 1):
                gain += self._likely[candidate]
                is_chain, before = is_chain and self._parents[candidate] == before, candidate
                prices = self._chain_ms if is_chain else self._tree_ms
                if count == len(prices):
                    break
                value = gain - self.rate * prices[count]
                if value > best_value:
                    best, best_value, best_ms = line[:count], value, prices[count]
        self._round_ms += best_ms
        kept = sorted(best)
        row = {candidate: index for index, candidate in enumerate(kept, 1)} | {-1: 0}
        return HostTree(
            tokens=[self._drafted[candidate] for candidate in kept],
            parents=[row[self._parents[candidate]] for candidate in kept],
            scores=[self._scores[candidate] for candidate in kept],
        )

    def observe(self, num_tokens: int) -> None:
        """Book what the round gained, the bonus token included, and what it should have cost."""
        self._tokens += num_tokens
        self._ms += self._round_ms


def grow_while_it_pays(
    session: DraftSession, economist: Economist, parts: Parts | None = None
) -> HostTree:
    """Grow a tree below the last committed token.

    Args:
        session: The draft.
        economist: Decides.
        parts: Books passes, ranking and its transfer as steps, and what is decided as tree.
    """
    session.open_round()
    economist.open_round()
    seen_WR: list[list[bool]] = [[]]
    while True:
        tokens_WK, logs_WK = session.guess_likely(economist.num_guesses)
        economist.look(*_to_host(tokens_WK, logs_WK))
        if parts is not None:
            parts.lap("steps")
        fed_W, rows_W = economist.expand()
        if parts is not None:
            parts.lap("tree")
        if not fed_W:
            break
        num_fed = len(fed_W)
        seen_WR = [
            seen_WR[row] + [other == own for other in range(num_fed)]
            for own, row in enumerate(rows_W)
        ]
        mask_WR = None
        if not all(map(all, seen_WR)):
            mask_WR = to_device(seen_WR, tokens_WK.device)
        session.feed(
            tokens_WK.flatten()[_index(fed_W, tokens_WK.device)],
            _index(rows_W, tokens_WK.device),
            mask_WR,
        )
    session.close_round()
    return economist.harvest()


def to_device(values: list[Any], device: torch.device) -> Tensor:
    """A tensor of host values, without waiting for the device."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _index(places: list[int], device: torch.device) -> Tensor | slice:
    """What picks rows; neighbours need no tensor for it."""
    first, stop = places[0], places[0] + len(places)
    return slice(first, stop) if places == list(range(first, stop)) else to_device(places, device)


def _to_host(tokens_WK: Tensor, logs_WK: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Best guesses and their logarithms as numbers: one transfer from a GPU."""
    if not tokens_WK.is_cuda:
        return tokens_WK.tolist(), logs_WK.tolist()
    both = torch.stack([tokens_WK.double(), logs_WK.double()]).tolist()
    return [[int(token) for token in row] for row in both[0]], both[1]
