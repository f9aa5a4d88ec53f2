"""Preallocated keys and values of a draft in decoding.

Shapes: K key/value heads, S capacity, E head size. Rows [0, length) are committed: they came from
target features. Self-fed rows of the running round lie behind them and are forgotten at its end.
"""

import torch
from torch import Tensor

from dreams_nas.draft.weights import DraftWeights


class DraftCache:
    """Keys and values of one sequence, written in place."""

    def __init__(self, weights: DraftWeights, capacity: int) -> None:
        """Allocate every layer's buffers for `capacity` rows, self-fed ones included."""
        self.capacity = capacity
        self.length = 0
        self._end = 0
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        for layer in weights.layers:
            shape = (1, layer.k.shape[0] // weights.head_size, capacity, weights.head_size)
            self._k.append(torch.zeros(shape, dtype=layer.k.dtype, device=layer.k.device))
            self._v.append(torch.zeros_like(self._k[-1]))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Keys of all layers, then values, [1, K, S, E] each."""
        return (*self._k, *self._v)

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """Keys of all layers, [1, K, S, E] each."""
        return tuple(self._k)

    @property
    def values(self) -> tuple[Tensor, ...]:
        """Values of all layers, [1, K, S, E] each."""
        return tuple(self._v)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(t.numel() * t.element_size() for t in self.buffers)

    @property
    def num_self_fed(self) -> int:
        """Rows of the running round behind the committed ones."""
        return self._end - self.length

    def open(self, num_rows: int) -> None:
        """Make room for the next pass behind everything written so far."""
        self._end += num_rows
        assert self._end <= self.capacity, f"draft cache of {self.capacity} rows needs {self._end}"

    def commit(self) -> None:
        """Declare everything written so far committed."""
        self.length = self._end

    def reset(self) -> None:
        """Forget the sequence; the buffers stay."""
        self.length = self._end = 0

    def rewind(self) -> None:
        """Forget the self-fed rows."""
        self._end = self.length

    def update(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows that `open` made room for; return views of all rows so far."""
        k, v, start = self._k[layer], self._v[layer], self._end - k_BKTE.shape[2]
        k[:, :, start : self._end] = k_BKTE
        v[:, :, start : self._end] = v_BKTE
        return k[:, :, : self._end], v[:, :, : self._end]
