"""The tensors of a draft, as plain tuples.

The forward of a draft (`layers.py`) is a function of these tuples. A trained `DraftModel` fills
them with its parameters, the supernet with views of its own: that is why a subnet and its extracted
draft cannot differ.

Shapes: D hidden, H query heads, K key/value heads, E head size, I feed-forward channels, F = L * D
tapped features, V vocabulary rows kept. Layer 0 reads 2 * D inputs, later ones D.
"""

from typing import NamedTuple

from torch import Tensor


class LayerWeights(NamedTuple):
    """One decoder layer. `hidden_norm_D` belongs to layer 0 alone and is None elsewhere."""

    input_norm_D: Tensor
    hidden_norm_D: Tensor | None
    q: Tensor
    """[H * E, inputs]"""
    k: Tensor
    """[K * E, inputs]"""
    v: Tensor
    """[K * E, inputs]"""
    o: Tensor
    """[D, H * E]"""
    post_norm_D: Tensor
    gate: Tensor
    """[I, D]"""
    up: Tensor
    """[I, D]"""
    down: Tensor
    """[D, I]"""


class DraftWeights(NamedTuple):
    """A whole draft, the target's shared embedding excepted."""

    fc: Tensor
    """[D, F]: fuses the tapped features; one column block per tap."""
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head_VD: Tensor
    """Rows of the target's head, most frequent tokens first."""
    inv_freq: Tensor
    """[E / 2] rotary frequencies."""
    eps: float
    """Epsilon of every norm."""

    @property
    def head_size(self) -> int:
        """E."""
        return 2 * self.inv_freq.shape[0]
