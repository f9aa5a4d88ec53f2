"""What a round's time is spent on, in the terms of the latency table."""

import time
from collections.abc import Mapping

import torch

PART_NAMES = ("sync", "steps", "tree", "verify", "accept", "commit")
"""In order: the draft commits the prompt, then what was gained; it drafts, its head and ranking
included; drafted tokens join the root, and where a policy decides in each round, its decisions; the
target's pass; its choices come to the host and are followed through the tree; accepted rows are
kept. What is left of a round is its `rest`."""


class Parts:
    """A stopwatch for the parts of rounds.

    It waits for the device at the end of every part, which costs time on a GPU: rounds that it
    watches are for shares, never for speedups.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PART_NAMES, 0.0)
        self._device = device
        self._last = 0.0

    def start(self) -> None:
        """Begin a round."""
        self._last = self._now()

    def lap(self, name: str) -> None:
        """Book the time since the last call on a part."""
        now = self._now()
        self.seconds[name] += now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def shares(seconds: Mapping[str, float], total_s: float) -> dict[str, float]:
    """Share of each part in rounds that took `total_s` together, the rest included."""
    known = {name: seconds[name] / total_s for name in PART_NAMES}
    return {**known, "rest": 1.0 - sum(known.values())}
