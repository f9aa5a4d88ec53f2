"""Interpolation between the measured points of one block, never beyond them."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dreams_nas.core.errors import UserError
from dreams_nas.latency.blocks import GroupKey, describe_group

FloatArray = npt.NDArray[np.float64]
ArrayLike = int | float | npt.NDArray[Any]


class Grid:
    """Milliseconds of one block over (q, kv): piecewise linear in each, exact at the points.

    Rows of different q may have been measured at different kv; between two of them only the kv
    that both cover can be looked up.
    """

    def __init__(self, key: GroupKey, points: Iterable[tuple[int, int, float]]) -> None:
        """Build the arrays once.

        Args:
            key: Block and dimensions, for errors.
            points: (q, kv, milliseconds), each (q, kv) once.
        """
        self.key = key
        rows: dict[int, list[tuple[int, float]]] = {}
        for q, kv, ms in points:
            rows.setdefault(q, []).append((kv, ms))
        self._q = np.array(sorted(rows), dtype=np.float64)
        self._kv = np.array(sorted({kv for row in rows.values() for kv, _ in row}), np.float64)
        # The common kv axis holds every row's own knots, so that resampling changes nothing.
        self._ms = np.full((len(self._q), len(self._kv)), np.nan)
        for i, q in enumerate(sorted(rows)):
            kvs, values = zip(*sorted(rows[q]), strict=True)
            self._ms[i] = np.interp(self._kv, kvs, values, left=np.nan, right=np.nan)

    @property
    def q_range(self) -> tuple[int, int]:
        """Least and most rows measured."""
        return int(self._q[0]), int(self._q[-1])

    @property
    def kv_range(self) -> tuple[int, int]:
        """Least and most cached rows measured with any q."""
        return int(self._kv[0]), int(self._kv[-1])

    def __call__(self, q: ArrayLike, kv: ArrayLike = 0) -> FloatArray:
        """Milliseconds at q rows over kv cached rows; arrays broadcast.

        Raises:
            UserError: A point outside the measured range: names block, value, range and command.
        """
        q_array, kv_array = np.asarray(q, dtype=np.float64), np.asarray(kv, dtype=np.float64)
        i0, i1, fraction_q = self._locate("q", self._q, q_array)
        j0, j1, fraction_kv = self._locate("kv", self._kv, kv_array)
        low = self._mix(self._ms[i0, j0], self._ms[i0, j1], fraction_kv)
        high = self._mix(self._ms[i1, j0], self._ms[i1, j1], fraction_kv)
        result: FloatArray = np.asarray(self._mix(low, high, fraction_q))
        if np.isnan(result).any():
            self._raise_hole(q_array, kv_array, result)
        return result

    @staticmethod
    def _mix(low: FloatArray, high: FloatArray, fraction: FloatArray) -> FloatArray:
        return low + (high - low) * fraction

    def _locate(
        self, name: str, axis: FloatArray, value: FloatArray
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], FloatArray]:
        """Neighbouring knots and the fraction of the way; on a knot both are that knot."""
        if value.size and (value.min() < axis[0] or value.max() > axis[-1]):
            worst = float(value.max() if value.max() > axis[-1] else value.min())
            raise self._range_error(name, worst, float(axis[0]), float(axis[-1]))
        below = np.asarray(np.searchsorted(axis, value, side="right") - 1)
        above = np.minimum(below + 1, len(axis) - 1)
        span = axis[above] - axis[below]
        fraction = np.where(span > 0, (value - axis[below]) / np.where(span > 0, span, 1.0), 0.0)
        return below, np.where(fraction > 0, above, below), fraction

    def _raise_hole(self, q: FloatArray, kv: FloatArray, result: FloatArray) -> None:
        """The point is inside both axes, but one of its rows was not measured at this kv."""
        q_all, kv_all, ms = np.broadcast_arrays(q, kv, result)
        where = tuple(np.argwhere(np.isnan(ms))[0])
        q_bad, kv_bad = float(q_all[where]), float(kv_all[where])
        i0, i1, _ = self._locate("q", self._q, np.asarray(q_bad))
        both = ~np.isnan(self._ms[int(i0)]) & ~np.isnan(self._ms[int(i1)])
        covered = self._kv[both]
        low, high = (float(covered[0]), float(covered[-1])) if covered.size else (np.nan, np.nan)
        raise self._range_error("kv", kv_bad, low, high, f" at q = {q_bad:g}")

    def _range_error(
        self, name: str, value: float, low: float, high: float, where: str = ""
    ) -> UserError:
        is_known = not np.isnan(low)
        measured = f"only {low:g} to {high:g} was measured" if is_known else "nothing was measured"
        # A prefill's q is a prompt's length, which `profile` bounds by --max-kv.
        flag = "--max-kv" if name == "kv" or "prefill" in self.key[0] else "--max-q"
        command = "dreams-nas profile" if value < low else f"dreams-nas profile {flag} {value:g}"
        return UserError(
            f"latency of {describe_group(self.key)}: {name} = {value:g}{where}, but {measured}; "
            f"a table is never extrapolated, measure it with `{command}`"
        )
