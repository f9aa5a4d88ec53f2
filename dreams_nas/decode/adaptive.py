"""How much to speculate, decided every round from measured costs and calibrated probabilities.

At a rate of r tokens per millisecond a millisecond is worth r tokens: a draft step is taken while
the tokens it should gain outweigh its time, and nodes are verified while their probability
outweighs the time that they add (design, section 10). What is decided depends on nothing but the
draft's scores and the tokens gained, so that an answer always takes the same rounds.

Each level reads the draft's best guesses on the host, one small transfer; the tree is grown there,
as plain numbers. It needs no other transfer but that of the target's choices.

Shapes: W rows of a draft step, K guesses of each, Q verified rows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dreams_nas.decode.costs import RoundCosts
from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.parts import Parts
from dreams_nas.space.policy import Calibration

_NEGLIGIBLE = 0.02
"""Guesses less likely than this are dropped at sight: fifty of them gain one token."""
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

    def mask(self, hidden: float) -> list[list[float]]:
        """Additive mask of the verified rows: 0 for ancestors and self, `hidden` elsewhere."""
        num_rows = len(self.parents) + 1
        rows = [[0.0] + [hidden] * (num_rows - 1)]
        for row, parent in enumerate(self.parents, 1):
            rows.append(rows[parent].copy())
            rows[row][row] = 0.0
        return rows


class Economist:
    """The adaptive rule for one request: what is expanded, what is verified.

    Candidates of a round are numbered in the order they were drafted, level by level; -1 is the
    root. It runs between the passes of a draft, on lists of a few numbers: measured (microseconds a
    level, 3 guesses of one row) 12.5 where every guess was looked up and sorted, 6.5 now.
    """

    def __init__(self, plan: AdaptivePlan) -> None:
        costs, calibration = plan.costs, plan.calibration
        self._policy = calibration.tree
        levels = [calibration.level(n) for n in range(1, plan.num_levels + 1)]
        self._maps = [(level.log_probabilities, *level.lines) for level in levels]
        self._continuation = [level.continuation for level in levels]
        self._sync_ms, self._decide_ms = costs.sync_ms, costs.decide_ms
        self._chain_ms, self._tree_ms = costs.chain_ms.tolist(), costs.tree_ms.tolist()
        node_ms = (self._tree_ms[-1] - self._tree_ms[1]) / max(1, len(self._tree_ms) - 2)
        self._step_ms = [ms + costs.decide_ms for ms in costs.step_ms.tolist()]
        self._level_ms = [ms + node_ms * w for w, ms in enumerate(self._step_ms, 1)]
        """A step of 1, 2, ... rows and what verifying a guess of each should add."""
        num_tokens = calibration.tokens_per_round
        num_nodes = min(len(self._chain_ms) - 1, round(num_tokens))
        first_ms = costs.sync_ms + (num_nodes - 1) * self._step_ms[0] + self._chain_ms[num_nodes]
        self._tokens, self._ms = _PRIOR_ROUNDS * num_tokens, _PRIOR_ROUNDS * first_ms
        self.open_round()

    @property
    def rate(self) -> float:
        """Tokens per millisecond so far; plain decoding is always to be had."""
        return max(self._tokens / self._ms, 1 / self._chain_ms[0])

    @property
    def num_guesses(self) -> int:
        """Best guesses wanted of every row."""
        return self._policy.width

    def open_round(self) -> None:
        """Forget the last round's candidates."""
        self._drafted: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._likely: list[float] = []
        self._fed = [-1]
        """Candidates that the running pass expands."""
        self._level = 0
        self._round_ms = self._sync_ms + self._decide_ms
        self._rate = self.rate

    def look(
        self, tokens_WK: Sequence[Sequence[int]], logs_WK: Sequence[Sequence[float]]
    ) -> tuple[list[int], list[int]]:
        """Take the best guesses of the running pass's rows and say which are fed back.

        Args:
            tokens_WK: Best guesses of each row, the best first.
            logs_WK: How likely the draft holds them, natural logarithms.

        Returns:
            Their places among the guesses, row by row, ascending, and the row of each; none when
            drafting no longer pays.
        """
        knots, offsets, slopes = self._maps[self._level]
        first = len(self._drafted)
        self._level += 1
        places: list[int] = []
        num_guesses = len(logs_WK[0])
        for row, parent in enumerate(self._fed):
            score, most = 0.0, 1.0
            if parent >= 0:
                score, most = self._scores[parent], self._likely[parent]
            for rank, log in enumerate(logs_WK[row]):
                path = score + log
                piece = bisect_right(knots, path)
                likely = offsets[piece] + slopes[piece] * path
                if likely > most:  # fitted apart, a level's map may lie above that of the parents
                    likely = most
                elif likely < _NEGLIGIBLE and places:
                    break  # and so are the row's further guesses
                places.append(row * num_guesses + rank)
                self._drafted.append(tokens_WK[row][rank])
                self._parents.append(parent)
                self._scores.append(path)
                self._likely.append(likely)
        if self._level == self._policy.num_levels:
            return [], []
        self._fed = chosen = self._worth_a_step(first)
        if not chosen:
            return [], []
        self._round_ms += self._step_ms[len(chosen) - 1]
        fed = [places[candidate - first] for candidate in chosen]
        return fed, [place // num_guesses for place in fed]

    def _worth_a_step(self, first: int) -> list[int]:
        """Candidates from `first` on whose further guesses outweigh the time they take."""
        likely, level_ms, rate = self._likely, self._level_ms, self._rate
        going_on = self._continuation[self._level - 1]
        if len(likely) == first + 1:
            return [first] if going_on * likely[first] > rate * level_ms[0] else []
        order = sorted(range(first, len(likely)), key=likely.__getitem__, reverse=True)
        best, best_value, gain = 0, 0.0, 0.0
        for width in range(1, min(self._policy.width, len(level_ms), len(order)) + 1):
            gain += going_on * likely[order[width - 1]]
            value = gain - rate * level_ms[width - 1]
            if value > best_value:
                best, best_value = width, value
        return sorted(order[:best])

    def harvest(self) -> HostTree:
        """What is verified: nodes are added, the likeliest first, while they pay."""
        likely, parents = self._likely, self._parents
        kept, value, cost_ms = self._most_worth(
            sorted(range(len(likely)), key=likely.__getitem__, reverse=True)
        )
        if any(parents[candidate] != before for before, candidate in pairwise([-1, *kept])):
            spine = [-1]
            for candidate, parent in enumerate(parents):
                if parent == spine[-1]:  # the first of a row is its best
                    spine.append(candidate)
            chain, chain_value, chain_ms = self._most_worth(spine[1:])
            if chain_value >= value:
                kept, cost_ms = chain, chain_ms
        self._round_ms += cost_ms
        kept.sort()
        row = {candidate: index for index, candidate in enumerate(kept, 1)} | {-1: 0}
        return HostTree(
            tokens=[self._drafted[candidate] for candidate in kept],
            parents=[row[parents[candidate]] for candidate in kept],
            scores=[self._scores[candidate] for candidate in kept],
        )

    def _most_worth(self, line: list[int]) -> tuple[list[int], float, float]:
        """How many candidates of a line to verify: they, what they are worth, what they cost."""
        likely, parents, rate, prices = self._likely, self._parents, self._rate, self._chain_ms
        best, best_value, gain, before = 0, -rate * prices[0], 0.0, -1
        cost_ms = prices[0]
        for count, candidate in enumerate(line[: self._policy.num_nodes], 1):
            if parents[candidate] != before:
                prices = self._tree_ms
            if count == len(prices):
                break
            gain, before = gain + likely[candidate], candidate
            value = gain - rate * prices[count]
            if value > best_value:
                best, best_value, cost_ms = count, value, prices[count]
        return line[:best], best_value, cost_ms

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
        tokens, logs = to_host(tokens_WK, logs_WK)
        if parts is not None:
            parts.lap("steps")
        fed_W, rows_W = economist.look(tokens, logs)
        if parts is not None:
            parts.lap("tree")
        if not fed_W:
            break
        if len(fed_W) == len(tokens) == 1 and all(seen_WR[0]):  # a chain so far, and further
            seen_WR[0].append(True)
            session.feed(tokens_WK[0, fed_W[0] : fed_W[0] + 1], None, None)
            continue
        seen_WR = [
            seen_WR[row] + [other == own for other in range(len(fed_W))]
            for own, row in enumerate(rows_W)
        ]
        device = tokens_WK.device
        mask_WR = None if all(map(all, seen_WR)) else to_device(seen_WR, device)
        fed_tokens_W = tokens_WK.flatten()[to_device(fed_W, device)]
        session.feed(fed_tokens_W, to_device(rows_W, device), mask_WR)
    session.close_round()
    return economist.harvest()


class VerifyTensors:
    """What a grown tree is verified with; chains take views of what was built once."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Build those of the longest chain."""
        self._hidden = torch.finfo(dtype).min
        self._dtype, self._device = dtype, device
        self._depths_Q = torch.arange(num_rows, device=device)
        hidden = torch.full((num_rows, num_rows), self._hidden, dtype=dtype, device=device)
        self._mask_QQ = hidden.triu_(1)

    def of(self, tree: HostTree) -> tuple[Tensor, Tensor | None]:
        """Depths and additive mask; no mask for a lone root."""
        num_rows = len(tree.parents) + 1
        if num_rows == 1:
            return self._depths_Q[:1], None
        if tree.is_chain:
            return self._depths_Q[:num_rows], self._mask_QQ[:num_rows, :num_rows]
        mask_QQ = to_device(tree.mask(self._hidden), self._device, self._dtype)
        return to_device(tree.depths(), self._device), mask_QQ


def to_device(values: list[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of host values, without waiting for the device."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def to_host(tokens_WK: Tensor, logs_WK: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Best guesses and their logarithms as numbers: one transfer from a GPU."""
    if not tokens_WK.is_cuda:
        return tokens_WK.tolist(), logs_WK.tolist()
    both = torch.stack([tokens_WK.double(), logs_WK.double()]).tolist()
    return [[int(token) for token in row] for row in both[0]], both[1]
