"""Points to time, and the table's entries as weighted sums of them.

Most entries are one point as it stands. Some are a slope between two points, or what is left of a
whole pass when its other blocks are taken off; all of these are linear, so that an entry is a
mapping from keys of points to factors.
"""

import bisect
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dreams_nas.latency.blocks import Block, Dims, GroupKey, describe_group, group_key
from dreams_nas.latency.table import LatencyEntry
from dreams_nas.profiling.timers import Point, Timing, combine

Terms = dict[str, float]
"""Factor by key of a point."""


class _Recipe(NamedTuple):
    block: Block
    q: int
    kv: int
    dims: Dims
    terms: Terms


class PointSet:
    """Collects points and entries."""

    def __init__(self) -> None:
        """Start empty."""
        self.points: dict[str, Point] = {}
        self._recipes: dict[tuple[GroupKey, int, int], _Recipe] = {}

    def add_point(self, point: Point) -> str:
        """Time this; returns its key."""
        assert point.key not in self.points, f"point {point.key} is added twice"
        self.points[point.key] = point
        return point.key

    def add_entry(self, block: Block, q: int, kv: int, dims: Dims, terms: Terms) -> None:
        """Make an entry of points."""
        self._recipes[group_key(block, dims), q, kv] = _Recipe(block, q, kv, dims, terms)

    def add(
        self,
        block: Block,
        q: int,
        kv: int,
        dims: Dims,
        run: Callable[[], object],
        prepare: Callable[[], object],
        every: int = 1,
    ) -> None:
        """A point that is an entry as it stands; arguments as of `Point`."""
        key = f"{describe_group(group_key(block, dims))} q={q} kv={kv}"
        self.add_entry(block, q, kv, dims, {self.add_point(Point(key, run, prepare, every)): 1.0})

    @property
    def num_entries(self) -> int:
        """Entries that the table will have."""
        return len(self._recipes)

    def entries_with(self, keys: set[str]) -> int:
        """How many entries depend on any of these points."""
        return sum(not keys.isdisjoint(recipe.terms) for recipe in self._recipes.values())

    def terms_at(self, block: Block, dims: Dims, q: int, kv: int = 0) -> Terms:
        """An entry's terms at any size inside the measured ones, interpolated as the table does."""
        group = group_key(block, dims)
        terms: list[tuple[float, Terms]] = []
        for at_q, share_q in _neighbours([k[1] for k in self._recipes if k[0] == group], q):
            kvs = [k[2] for k in self._recipes if k[0] == group and k[1] == at_q]
            for at_kv, share_kv in _neighbours(kvs, kv):
                terms.append((share_q * share_kv, self._recipes[group, at_q, at_kv].terms))
        return add_terms(*terms)

    def entries(self, timings: Mapping[str, Timing]) -> list[LatencyEntry]:
        """The entries, from the timings of all points."""
        found = []
        for recipe in self._recipes.values():
            timing = combine([(factor, timings[key]) for key, factor in recipe.terms.items()])
            found.append(
                LatencyEntry(
                    block=recipe.block, q=recipe.q, kv=recipe.kv, dims=recipe.dims,
                    **timing._asdict(),
                )
            )  # fmt: skip
        return found


def add_terms(*parts: tuple[float, Terms]) -> Terms:
    """A weighted sum; points that cancel are gone."""
    total: Terms = {}
    for factor, terms in parts:
        for key, value in terms.items():
            total[key] = total.get(key, 0.0) + factor * value
    return {key: value for key, value in total.items() if abs(value) > 1e-12}


def _neighbours(values: list[int], wanted: int) -> list[tuple[int, float]]:
    """The measured values around the wanted one with their shares."""
    axis = sorted(set(values))
    assert axis, "nothing was measured"
    assert axis[0] <= wanted <= axis[-1], f"{wanted} is outside {axis}"
    above = bisect.bisect_left(axis, wanted)
    if axis[above] == wanted:
        return [(wanted, 1.0)]
    low, high = axis[above - 1], axis[above]
    share = (wanted - low) / (high - low)
    return [(low, 1.0 - share), (high, share)]
