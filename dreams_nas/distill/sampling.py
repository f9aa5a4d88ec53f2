"""What step k trains on, as a function of the step and a seed: nothing to save, nothing to lose.

A resumed run asks for the same steps and gets the same answers and subnets; ranks of a distributed
run train the same subnets on different batches.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dreams_nas.core.console import warn
from dreams_nas.core.errors import UserError
from dreams_nas.core.seeds import derive_seed
from dreams_nas.features.recording import Recording
from dreams_nas.replay.batches import length_buckets
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import DIMENSIONS, SearchSpace

_POOL_BATCHES = 8
"""Batches whose answers are sorted by length together: little padding, still little order."""

_WIDTHS = ("head_ratio", "ffn_ratio")


class Recordings(Protocol):
    """Recorded answers by index: a feature store, or a list."""

    def __len__(self) -> int:
        """Number of answers."""

    def __getitem__(self, index: int, /) -> Recording:
        """One answer."""


def usable_lengths(recordings: Recordings) -> dict[int, int]:
    """Tokens of each recording that has a token to supervise, by index; others are counted.

    Raises:
        UserError: None is left to train on.
    """
    lengths: dict[int, int] = {}
    dropped: list[str] = []
    for index in range(len(recordings)):
        recording = recordings[index]
        if recording.num_answer_tokens < 2:
            dropped.append(recording.id)
        else:
            lengths[index] = len(recording.tokens_T)
    if not lengths:
        raise UserError(
            f"none of {len(recordings)} recorded answers has 2 or more tokens, so there is nothing "
            "to train on; collect answers first, or allow longer ones"
        )
    if dropped:
        warn(
            f"{len(dropped)} of {len(recordings)} recorded answers have fewer than 2 tokens and "
            f"supervise nothing; they are left out (the first is '{dropped[0]}')"
        )
    return lengths


class BatchSampler:
    """Batches of answers of like length, every answer once per epoch."""

    def __init__(self, lengths: Mapping[int, int], batch_tokens: int, seed: int) -> None:
        """Sample from answers of these lengths.

        Args:
            lengths: Tokens of each answer, by index.
            batch_tokens: Most padded tokens of a batch; a longer answer is a batch of its own.
            seed: Of the order.
        """
        self._lengths, self._batch_tokens, self._seed = dict(lengths), batch_tokens, seed
        self._epochs: list[list[list[int]]] = []
        self._starts: list[int] = [0]

    def batch(self, index: int) -> list[int]:
        """Answers of the batch of that index, counted through all epochs."""
        while self._starts[-1] <= index:
            self._epochs.append(self._epoch(len(self._epochs)))
            self._starts.append(self._starts[-1] + len(self._epochs[-1]))
        epoch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._epochs[epoch][index - self._starts[epoch]]

    def _epoch(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng(derive_seed(self._seed, "epoch", epoch))
        order = rng.permutation(list(self._lengths)).tolist()
        mean_length = sum(self._lengths.values()) / len(self._lengths)
        pool = max(1, round(_POOL_BATCHES * self._batch_tokens / mean_length))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            members = order[start : start + pool]
            groups = length_buckets([self._lengths[i] for i in members], self._batch_tokens)
            batches += [[members[i] for i in group] for group in groups]
        return [batches[i] for i in rng.permutation(len(batches))]


class SubnetSampler:
    """The sandwich rule with progressive shrinking.

    Each step trains the largest subnet, the smallest open one and some random open ones. Taps have
    no order, so that both ends of the sandwich take them in turns. Depth, share of image tokens and
    vocabulary are open from the start; widths open one choice after the other over the first half
    (once-for-all, arXiv 1908.09791, shrinks one dimension after the other in the same way).
    """

    def __init__(self, space: SearchSpace, num_random: int, seed: int) -> None:
        """Sample from a space, `num_random` subnets besides the two ends."""
        self._space, self._num_random, self._seed = space, num_random, seed
        self._largest, self._smallest = space.largest(), space.smallest()

    def choose(self, step: int, progress: float) -> list[DraftArch]:
        """Subnets of a step, without doubles.

        Args:
            step: Counted from 0; decides the draw.
            progress: Share of the phase that is done, [0, 1]; decides which widths are open.
        """
        rng = np.random.default_rng(derive_seed(self._seed, "subnets", step))
        taps = self._space.tap
        largest = self._largest.replace(tap=self._turn(step))
        widths = {name: self.open_choices(name, progress) for name in _WIDTHS}
        smallest = self._smallest.replace(
            tap=self._turn(step + len(taps) // 2), **{name: c[0] for name, c in widths.items()}
        )
        drawn = [self._draw(rng, widths) for _ in range(self._num_random)]
        return list(dict.fromkeys([largest, smallest, *drawn]))

    def open_choices(self, name: str, progress: float) -> tuple[Any, ...]:
        """Choices of a dimension that subnets may take by now, ascending."""
        choices = self._space.choices(name)
        if name not in _WIDTHS:
            return choices
        num_open = 2 + int(2 * max(progress, 0.0) * max(len(choices) - 1, 0))
        return choices[-num_open:]

    def _turn(self, step: int) -> Any:
        """Tap of a step: the space's, one after the other, the largest first."""
        taps = self._space.tap
        first = taps.index(self._largest.tap)
        return taps[(first + step) % len(taps)]

    def _draw(self, rng: np.random.Generator, widths: dict[str, tuple[Any, ...]]) -> DraftArch:
        values = {}
        for name in DIMENSIONS:
            choices = widths.get(name, self._space.choices(name))
            values[name] = choices[int(rng.integers(len(choices)))]
        return DraftArch(**values)
