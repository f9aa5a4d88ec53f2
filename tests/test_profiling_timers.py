"""Timers: what disturbs single measurements does not move the result."""

from collections.abc import Callable

import numpy as np
import pytest

from dreams_nas.profiling.timers import Point, TimerConfig, Timing, combine, measure_points


class FakeClock:
    """Stands still until somebody spends time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def spend(self, ms: float) -> None:
        self.seconds += ms / 1000.0


class Work:
    """A point whose n-th call takes what `cost` says, in milliseconds."""

    def __init__(self, clock: FakeClock, key: str, cost: Callable[[int], float]) -> None:
        self.clock, self.key, self.cost, self.num_calls = clock, key, cost, 0

    def __call__(self) -> None:
        self.clock.spend(self.cost(self.num_calls))
        self.num_calls += 1


def _measure(clock, works, *, sentinel=None, budget_s=float("inf"), every=1, **config):
    points = [Point(work.key, work, every=every) for work in works]
    settings = TimerConfig(**{"min_sweeps": 5, "max_sweeps": 20, **config})
    guard = None if sentinel is None else Point("sentinel", sentinel)
    rng = np.random.default_rng(0)
    return measure_points(points, clock, rng, settings, sentinel=guard, budget_s=budget_s)


def test_a_slow_first_call_and_outliers_move_no_median():
    clock = FakeClock()
    slow_first = Work(clock, "a", lambda n: 500.0 if n == 0 else 2.0)
    outliers = Work(clock, "b", lambda n: 117.0 if n % 5 == 4 else 0.5)
    found = _measure(clock, [slow_first, outliers])
    assert found.timings["a"] == Timing(
        pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0), 20
    )
    assert found.timings["b"].median_ms == pytest.approx(0.5)
    assert found.timings["b"].p90_ms > 50
    assert found.unsteady == []


def test_points_take_turns_in_changing_orders():
    clock, calls = FakeClock(), []
    works = [Work(clock, key, lambda n, key=key: calls.append(key) or 1.0) for key in "abcdef"]
    _measure(clock, works, max_sweeps=8, max_regates=0)
    sweeps = ["".join(calls[i : i + 6]) for i in range(6, len(calls), 6)]  # the first warms up
    assert len(sweeps) == 8
    assert all(sorted(sweep) == list("abcdef") for sweep in sweeps)
    assert len(set(sweeps)) > 5


def test_slow_drift_spreads_over_all_points():
    """Repeats of one point at once would call the later point slower; sweeps see them equal."""
    clock = FakeClock()

    def cost(_: int) -> float:
        return 1.0 + clock.seconds

    works = [Work(clock, key, cost) for key in "abcd"]
    timings = _measure(clock, works, max_regates=0).timings
    medians = [timings[key].median_ms for key in "abcd"]
    assert max(medians) / min(medians) < 1.02


def test_what_a_drifting_sentinel_brackets_is_measured_again():
    clock = FakeClock()
    disturbed = (0.10, 0.14)

    def cost(_: int) -> float:
        return 4.0 if disturbed[0] < clock.seconds < disturbed[1] else 1.0

    works = [Work(clock, str(i), cost) for i in range(8)]
    sentinel = Work(clock, "sentinel", cost)
    found = _measure(
        clock, works, sentinel=sentinel, sentinel_every=4, max_sweeps=15, min_sweeps=15
    )
    assert found.remeasured
    assert max(found.sentinel_ms) == pytest.approx(4.0)
    assert all(timing.n == 15 for timing in found.timings.values())
    quiet = _measure(FakeClock(), [], sentinel=None)
    assert quiet.remeasured == set()


def test_repeating_ends_on_a_machine_that_never_rests():
    clock = FakeClock()
    noise = np.random.default_rng(1)
    works = [Work(clock, str(i), lambda n: 1.0) for i in range(40)]
    sentinel = Work(clock, "sentinel", lambda n: float(noise.uniform(1, 5)))
    found = _measure(clock, works, sentinel=sentinel, sentinel_every=10, max_regates=0)
    calls = sum(work.num_calls for work in works)
    assert calls <= 40 + 1.26 * 20 * 40
    assert found.num_sweeps == 20


def test_barrier_stalls_are_measured_again_until_they_are_gone():
    clock = FakeClock()
    stalls = Work(clock, "a", lambda n: 117.0 if n < 12 and n % 4 else 0.5)
    steady = Work(clock, "b", lambda n: 3.0)
    found = _measure(clock, [stalls, steady], max_sweeps=10)
    assert found.timings["a"].median_ms == pytest.approx(0.5)
    assert steady.num_calls == 1 + 10  # only the other one was measured again


def test_points_that_stay_unsteady_are_named():
    clock = FakeClock()
    found = _measure(clock, [Work(clock, "a", lambda n: 9.0 if n % 3 else 0.5)])
    assert found.unsteady == ["a"]
    assert found.timings["a"].spread > 1.4


@pytest.mark.parametrize(
    ("budget_s", "num_sweeps"), [(0.0, 1), (0.03, 3), (0.05, 5), (0.1, 8), (10.0, 20)]
)
def test_the_budget_limits_sweeps_between_one_and_most(budget_s, num_sweeps):
    """Up to the least number, 5, a quarter more than the budget may be spent."""
    clock = FakeClock()
    found = _measure(clock, [Work(clock, "a", lambda n: 10.0)], budget_s=budget_s)
    assert found.num_sweeps == num_sweeps


def test_rare_points_take_part_in_every_nth_sweep():
    clock = FakeClock()
    works = [Work(clock, key, lambda n: 1.0) for key in "abcd"]
    found = _measure(clock, works, every=4, max_sweeps=17, min_sweeps=17)
    assert [found.timings[key].n for key in "abcd"] == [5, 5, 5, 5]


def test_prepare_runs_before_every_call_and_is_not_timed():
    clock, log = FakeClock(), []
    point = Point(
        "a",
        run=lambda: (log.append("run"), clock.spend(1.0)),
        prepare=lambda: (log.append("prepare"), clock.spend(50.0)),
    )
    config = TimerConfig(min_sweeps=3, max_sweeps=3)
    found = measure_points([point], clock, np.random.default_rng(0), config)
    assert found.timings["a"].median_ms == pytest.approx(1.0)
    assert log == ["prepare", "run"] * 4


def test_combine_weighs_terms_and_their_spreads():
    three, one = Timing(5.0, 4.0, 7.0, 20), Timing(2.0, 1.5, 2.5, 30)
    slope = combine([(0.5, three), (-0.5, one)])
    assert slope.median_ms == pytest.approx(1.5)
    assert slope.p10_ms == pytest.approx(1.5 - np.hypot(0.5, 0.25))
    assert slope.p90_ms == pytest.approx(1.5 + np.hypot(1.0, 0.25))
    assert slope.n == 20
    assert combine([(1.0, one), (-1.0, three)]).median_ms == 0.0
