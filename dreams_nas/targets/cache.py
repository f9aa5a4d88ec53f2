"""Preallocated keys and values of a target: written in place, rolled back by a number.

Shapes: S capacity, Q rows of a pass, K key/value heads, E head size. The tensors of all layers lie
in one buffer [2 * layers, 1, K, S, E] (keys and values alternate), so that moving accepted rows
takes one gather and one copy, however many layers there are.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dreams_nas.core.errors import RunError

_MOST_RUNS = 3
"""Runs of neighbouring rows, the prefix that stays among them, up to which each is moved alone."""


class PreallocatedCache(Cache):
    """Keys and values of one sequence for any decoder of transformers.

    Rows [0, length) are committed. A pass writes its rows behind them, where they stay until
    `commit` keeps some; a pass that was never committed is overwritten by the next. All layers
    keep all rows: a sliding window is the mask's business, or it could not be rolled back.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        capacity: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate `capacity` rows for every layer, rows of the running pass included."""
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = 0
        self.position_delta = 0
        """Position of row `length` minus `length`; not 0 where images take fewer positions."""
        shape = (2 * num_layers, 1, num_kv_heads, capacity, head_size)
        self._rows = torch.zeros(shape, dtype=dtype, device=device)
        self._no_mask = torch.zeros((1, 1, 1, capacity), dtype=dtype, device=device)
        self._num_written = 0
        self._written: tuple[Tensor, ...] = ()
        self._visible: tuple[Tensor, ...] = ()

    def __bool__(self) -> bool:
        """Always true: "no cache" is None, never an empty one."""
        return True

    def __len__(self) -> int:
        """Number of layers, as in transformers."""
        return self._rows.shape[0] // 2

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._rows.numel() * self._rows.element_size()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's rows of a pass, both [1, K, Q, E]; layer 0 opens the pass.

        Returns:
            Views of all rows, committed and written, [1, K, length + Q, E].

        Raises:
            RunError: The cache is too small; nothing was written.
        """
        if layer_idx == 0:
            self._open(key_states.shape[2])
        slot = 2 * layer_idx
        self._written[slot].copy_(key_states)
        self._written[slot + 1].copy_(value_states)
        return self._visible[slot], self._visible[slot + 1]

    def _open(self, num_rows: int) -> None:
        stop = self.length + num_rows
        if stop > self.capacity:
            raise RunError(
                f"the target's cache of {self.capacity} rows cannot take {num_rows} more behind "
                f"{self.length} committed ones ({stop} needed); build it with a larger capacity"
            )
        # Sliced once for all layers: per layer it would cost more than the copies themselves.
        self._num_written = num_rows
        self._written = self._rows.narrow(3, self.length, num_rows).unbind()
        self._visible = self._rows.narrow(3, 0, stop).unbind()

    @property
    def buffers(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of all layers, [1, K, S, E] each."""
        parts = self._rows.unbind()
        return parts[::2], parts[1::2]

    def take(self, num_rows: int) -> None:
        """Declare that a pass has written that many rows into the buffers itself."""
        self._num_written = num_rows

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last pass, ascending, and forget its others.

        A prefix (a chain, a prompt) costs nothing; other rows are moved to the front in place.
        """
        num_kept = len(rows)
        if num_kept:
            assert 0 <= rows[0] <= rows[-1] < self._num_written, (
                f"commit rows {rows[0]} to {rows[-1]} of a pass of {self._num_written}"
            )
            assert list(rows) == sorted(set(rows)), f"rows to commit must ascend: {list(rows)}"
            if rows[-1] != num_kept - 1:
                self._move(rows)
        self.length += num_kept
        self._num_written = 0
        self._written = self._visible = ()

    def _move(self, rows: Sequence[int]) -> None:
        """Move neighbours together: an accepted path seldom has more than two runs of them.

        Measured (microseconds, two CPU cores, 8 layers of 4 heads of 24): one run 3.4, two 5 to 6.5
        against 8 for a gather of all rows and a copy, which more runs take.
        """
        runs = _runs(rows)
        with torch.inference_mode():
            if len(runs) > _MOST_RUNS:
                index = torch.tensor(rows, pin_memory=self._rows.is_cuda)
                index = index.to(self._rows.device, non_blocking=True)
                written = self._rows.narrow(3, self.length, self._num_written)
                kept = written.index_select(3, index)
                self._rows.narrow(3, self.length, len(rows)).copy_(kept)
                return
            for place, first, count in runs:
                if first == place:
                    continue
                moved = self._rows.narrow(3, self.length + first, count)
                if first - place < count:  # they overlap their new place
                    moved = moved.clone()
                self._rows.narrow(3, self.length + place, count).copy_(moved)

    def zeros(self, num_rows: int) -> Tensor:
        """Additive mask of one query that sees everything, [1, 1, 1, num_rows]; never write it."""
        return self._no_mask.narrow(3, 0, num_rows)

    def committed(self) -> Tensor:
        """View of the committed rows of all layers, [2 * layers, 1, K, length, E]."""
        return self._rows.narrow(3, 0, self.length)

    def reset(self) -> None:
        """Forget the sequence; the buffers stay."""
        self.length = self.position_delta = self._num_written = 0
        self._written = self._visible = ()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed rows (transformers reads positions from it)."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Rows a pass of that many queries sees, and the index of the first of them."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity in rows."""
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: rolling back is `commit` with fewer rows."""
        raise AssertionError("roll a PreallocatedCache back with commit(), not crop()")


class Buffers(Protocol):
    """Keys and values that are written where a tensor says and shown whole."""

    length: Tensor
    """Row that the pass begins at, a scalar."""

    def update(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's rows of the pass; return its whole buffers."""


class WholeCache(Cache):
    """Shows such buffers to a decoder of transformers."""

    def __init__(self, buffers: Buffers) -> None:
        """Read and write these."""
        super().__init__(layers=[])
        self._buffers = buffers
        self.length = buffers.length
        self.position_delta = torch.zeros_like(buffers.length)
        """As that of `PreallocatedCache`, a scalar tensor."""

    def __bool__(self) -> bool:
        """Always true: "no cache" is None, never an empty one."""
        return True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's rows of a pass and show all rows, written or not."""
        return self._buffers.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unknown to the host; masks and positions are always given."""
        return 0


def _runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours among ascending rows: place among the rows, first row, count."""
    runs: list[tuple[int, int, int]] = []
    for place, row in enumerate(rows):
        if runs and row == runs[-1][1] + runs[-1][2]:
            start, first, count = runs[-1]
            runs[-1] = (start, first, count + 1)
        else:
            runs.append((place, row, 1))
    return runs
