"""Timing many points so that nothing but their own cost moves the result.

A laptop's clock, a neighbour's job and a thread that waits at a barrier all disturb single
measurements, and they do it for seconds at a time. So points are never repeated one after the
other: every sweep measures all of them once, in a new random order, and drift spreads over all
alike. A sentinel point, measured every few others, tells when the machine itself became slower or
faster; what lies between two such readings is measured again. Medians are kept, and a point whose
median is far above its tenth percentile (thread-barrier stalls do that) is measured again too.

The clock is injected: tests drive all of this with a fake one.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from pydantic import Field

from dreams_nas.core.config import Config

_NUM_SENTINEL_SAMPLES = 3
_MAX_REPEATED_SHARE = 0.25
"""Most groups of points that are measured again because the sentinel had drifted."""
MOST_OVERRUN = 1.25
"""Times the budget that may be spent to reach the least number of sweeps."""
_GATE_SHARE = 0.15
"""Share of the budget that is kept for points which have to be measured again at the end."""


class Clock(Protocol):
    """What tells the time."""

    def now(self) -> float:
        """Seconds, after all work given to the device has ended."""


class DeviceClock:
    """Wall time that waits for the device."""

    def __init__(self, device: str) -> None:
        """Read the time of work on "cpu" or "cuda:N"."""
        self._device = device

    def now(self) -> float:
        """Seconds of a steady clock."""
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class TimerConfig(Config):
    """How often points are measured, and what counts as a disturbance."""

    warmup: int = Field(default=1, ge=1)
    """Untimed calls of every point before the first sweep."""
    min_sweeps: int = Field(default=5, ge=1)
    """Sweeps over all points that are tried for beyond the budget, up to a quarter more of it; the
    first one is done in any case."""
    max_sweeps: int = Field(default=60, ge=1)
    """Sweeps after which measuring ends, even where budget is left."""
    sentinel_every: int = Field(default=20, ge=1)
    """Points between two readings of the sentinel."""
    drift: float = Field(default=0.15, gt=0)
    """Deviation of the sentinel from its median, as a share, from which the points beside it are
    measured again."""
    gate: float = Field(default=1.4, gt=1)
    """Median over tenth percentile from which a point is measured again."""
    max_regates: int = Field(default=2, ge=0)
    """How often such a point is measured again; after that it is reported as unsteady."""


class Timing(NamedTuple):
    """Statistics of one point, milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    n: int
    """Raw measurements behind them."""

    @property
    def spread(self) -> float:
        """Median over tenth percentile, 1 or more."""
        return self.median_ms / self.p10_ms if self.p10_ms > 0 else 1.0


def summarise(samples_ms: Sequence[float]) -> Timing:
    """Median and percentiles of raw samples."""
    p10, median, p90 = np.percentile(np.asarray(samples_ms, dtype=np.float64), (10, 50, 90))
    return Timing(float(median), float(p10), float(p90), len(samples_ms))


def combine(terms: Sequence[tuple[float, Timing]]) -> Timing:
    """A weighted sum of timings (slopes and remainders), never below 0.

    Their errors are taken to be independent: the distances of the percentiles from the median add
    up as squares, a subtracted term's with its sides exchanged.
    """
    median = sum(factor * t.median_ms for factor, t in terms)
    below = math.hypot(*(f * (t.median_ms - (t.p10_ms if f > 0 else t.p90_ms)) for f, t in terms))
    above = math.hypot(*(f * (t.median_ms - (t.p90_ms if f > 0 else t.p10_ms)) for f, t in terms))
    median = max(0.0, median)
    return Timing(median, max(0.0, median - below), median + above, min(t.n for _, t in terms))


def _nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Point:
    """One thing to time."""

    key: str
    """Its name among the points."""
    run: Callable[[], object]
    """What is timed."""
    prepare: Callable[[], object] = _nothing
    """Runs before every call, untimed: rolls caches back and leaves the processor's caches as the
    point finds them in a round."""
    every: int = 1
    """Takes part in each n-th sweep only: for points that matter less than they cost."""


@dataclass
class Measurement:
    """What `measure_points` found."""

    timings: dict[str, Timing]
    """By key."""
    sentinel_ms: list[float] = field(default_factory=list)
    """Readings of the sentinel in the order of time."""
    remeasured: set[str] = field(default_factory=set)
    """Keys of points that were measured again since the sentinel had drifted."""
    unsteady: list[str] = field(default_factory=list)
    """Keys of points that are above the gate although they were measured again."""
    num_sweeps: int = 0
    """Sweeps over all points."""


def time_once(point: Point, clock: Clock) -> float:
    """One sample, milliseconds."""
    point.prepare()
    started = clock.now()
    point.run()
    return (clock.now() - started) * 1000.0


class _Sweeper:
    """Samples of sweeps, groups between two sentinel readings being kept or done again."""

    def __init__(
        self, clock: Clock, rng: np.random.Generator, config: TimerConfig, sentinel: Point | None
    ) -> None:
        self._clock, self._rng, self._config = clock, rng, config
        self._sentinel = sentinel
        self.sentinel_ms: list[float] = []
        self.remeasured: set[str] = set()
        self._num_groups = self._num_repeated = 0

    def sweep(self, points: Sequence[Point], samples: dict[str, list[float]]) -> None:
        """Measure all points once, in random order."""
        order = [points[i] for i in self._rng.permutation(len(points))]
        for start in range(0, len(order), self._config.sentinel_every):
            group = order[start : start + self._config.sentinel_every]
            found = [time_once(point, self._clock) for point in group]
            self._num_groups += 1
            # On a machine that never comes to rest measuring again is in vain.
            may_repeat = self._num_repeated < _MAX_REPEATED_SHARE * self._num_groups
            if self._has_drifted() and may_repeat:
                self._num_repeated += 1
                self.remeasured.update(point.key for point in group)
                found = [time_once(point, self._clock) for point in group]
                self._has_drifted()  # its reading opens the next group
            for point, sample in zip(group, found, strict=True):
                samples.setdefault(point.key, []).append(sample)

    def read_sentinel(self) -> float:
        """One reading, milliseconds: a median, so that one stall is no drift."""
        assert self._sentinel is not None
        readings = [time_once(self._sentinel, self._clock) for _ in range(_NUM_SENTINEL_SAMPLES)]
        self.sentinel_ms.append(float(np.median(readings)))
        return self.sentinel_ms[-1]

    def _has_drifted(self) -> bool:
        """Read the sentinel; whether this reading or the one before is off its median."""
        if self._sentinel is None:
            return False
        before = self.sentinel_ms[-1] if self.sentinel_ms else self.read_sentinel()
        after = self.read_sentinel()
        usual = float(np.median(self.sentinel_ms))
        return any(abs(value / usual - 1) > self._config.drift for value in (before, after))


def measure_points(
    points: Sequence[Point],
    clock: Clock,
    rng: np.random.Generator,
    config: TimerConfig,
    *,
    budget_s: float = math.inf,
    sentinel: Point | None = None,
    advance: Callable[[float], object] = lambda seconds: None,
) -> Measurement:
    """Time all points, see the top of this file.

    Args:
        points: What to time; keys differ.
        clock: Injected.
        rng: Orders the sweeps.
        config: Repeats and gates.
        budget_s: Seconds that this may take. The least number of sweeps may take a quarter more;
            one sweep is done in any case, so that every point has a sample.
        sentinel: A point that is read every few others.
        advance: Told the seconds that went by, for a progress bar.
    """
    assert len({point.key for point in points}) == len(points), "keys of points differ"
    started = last = clock.now()
    for point in _warm_calls(points, sentinel, config.warmup):
        point.prepare()
        point.run()
    sweeper = _Sweeper(clock, rng, config, sentinel)
    samples: dict[str, list[float]] = {}
    num_sweeps = 0
    deadline = started + budget_s * (1 - _GATE_SHARE)
    last_call = started + budget_s * MOST_OVERRUN
    while num_sweeps < config.max_sweeps and (
        not num_sweeps or clock.now() < (deadline if num_sweeps >= config.min_sweeps else last_call)
    ):
        # Spread by position, or all rare points would meet in the same sweep. The first sweep takes
        # everybody, so that even the shortest run has samples of all.
        chosen = [p for i, p in enumerate(points) if (num_sweeps + i) % p.every == 0]
        chosen = chosen if num_sweeps else list(points)
        sweeper.sweep(chosen, samples)
        num_sweeps += 1
        now = clock.now()
        advance(now - last)
        last = now
    timings = {point.key: summarise(samples[point.key]) for point in points}
    ends = started + budget_s, last_call
    unsteady = _pass_gate(points, timings, sweeper, clock, config, *ends)
    advance(clock.now() - last)
    return Measurement(timings, sweeper.sentinel_ms, sweeper.remeasured, unsteady, num_sweeps)


def _warm_calls(points: Sequence[Point], sentinel: Point | None, times: int) -> Iterator[Point]:
    for point in (*points, *([] if sentinel is None else [sentinel])):
        for _ in range(times):
            yield point


def _pass_gate(
    points: Sequence[Point],
    timings: dict[str, Timing],
    sweeper: _Sweeper,
    clock: Clock,
    config: TimerConfig,
    deadline: float,
    last_call: float,
) -> list[str]:
    """Measure points with a median far above p10 again; keep the steadier set of samples."""
    for attempt in range(config.max_regates):
        failing = [p for p in points if timings[p.key].spread > config.gate]
        if not failing or (attempt and clock.now() >= deadline):
            break
        samples: dict[str, list[float]] = {}
        num_wanted = max(config.min_sweeps, *(timings[p.key].n for p in failing))
        for done in range(num_wanted):
            if clock.now() >= (deadline if done >= config.min_sweeps else last_call):
                break
            sweeper.sweep(failing, samples)
        for point in failing:
            # A set that was cut short can look steady because it is small.
            if len(samples.get(point.key, ())) < config.min_sweeps:
                continue
            again = summarise(samples[point.key])
            if again.spread < timings[point.key].spread:
                timings[point.key] = again
    return [point.key for point in points if timings[point.key].spread > config.gate]
