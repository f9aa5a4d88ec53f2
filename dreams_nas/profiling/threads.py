"""Cross-check of a deployment with several threads against one thread.

Small passes can lose more at the threads' barriers than they win. What to do about it is the
user's choice, since a table belongs to one number of threads: we warn and write both down.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dreams_nas.core.console import warn
from dreams_nas.profiling.points import PointSet
from dreams_nas.profiling.timers import Clock, Point, TimerConfig, measure_points

_NUM_SWEEPS = 11
_WORTH_SAYING = 0.97


def compare_threads(points: PointSet, threads: int, clock: Clock) -> dict[str, Any] | None:
    """Time a few points with one thread and with all, in turns.

    Args:
        points: Where the plain step, a verification and a draft layer are found.
        threads: Threads of the deployment.
        clock: Injected.

    Returns:
        Milliseconds by point for both; None where the deployment has one thread.
    """
    if threads == 1:
        return None
    chosen = _chosen(points)
    arms = {1: "one", threads: "all"}
    both = [
        Point(
            f"{name} {point.key}",
            point.run,
            _with_threads(count, point.prepare),
        )
        for count, name in arms.items()
        for point in chosen
    ]
    config = TimerConfig(min_sweeps=_NUM_SWEEPS, max_sweeps=_NUM_SWEEPS, max_regates=0)
    found = measure_points(both, clock, np.random.default_rng(0), config).timings
    torch.set_num_threads(threads)
    times = {
        name: {point.key: found[f"{name} {point.key}"].median_ms for point in chosen}
        for name in arms.values()
    }
    one_ms, all_ms = sum(times["one"].values()), sum(times["all"].values())
    if one_ms < _WORTH_SAYING * all_ms:
        warn(
            f"one thread is faster here than {threads} ({one_ms:.2f} against {all_ms:.2f} ms for "
            "a plain step, a verification and a draft layer); consider --threads 1"
        )
    return times


def _chosen(points: PointSet) -> list[Point]:
    """The middle one of each kind, by the order in which they were added."""
    kinds = ("target_step", "verify(mask=tree)", "1 draft layers")
    groups = [[p for key, p in points.points.items() if key.startswith(kind)] for kind in kinds]
    return [group[len(group) // 2] for group in groups]


def _with_threads(count: int, prepare: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        torch.set_num_threads(count)
        prepare()

    return run
