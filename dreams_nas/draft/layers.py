"""The forward of a draft, as functions of its weights (`fuse` interaction).

Row t holds the target's feature of position t and the token of position t + 1, and predicts token
t + 2. Layer 0 reads [norm(embedding) ; hidden_norm(fused feature)] and its residual is the fused
feature; later layers are plain pre-norm Llama layers. This is the mathematics of EAGLE-3
(arXiv 2503.01840), so that serving engines can load such a draft. At self-fed rows the draft's own
state before its final norm stands where the fused feature stood.

Shapes: B batch, T rows of this pass, C rows kept and cached before, D hidden, H query heads,
K key/value heads, E head size, F tapped features, V vocabulary rows.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dreams_nas.draft.weights import DraftWeights, LayerWeights


class KeyValues(Protocol):
    """Where a layer's keys and values go, and what its queries see."""

    def update(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the pass's keys and values; return all its rows may see, [B, K, C + T, E]."""


class Rotary(NamedTuple):
    """Cosines and signed sines of some positions, broadcastable to [B, heads, T, E]."""

    cos: Tensor
    sin: Tensor


def build_rotary(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """Rotary table of any positions, [..., T] -> [..., T, E], the half-split layout of Llama."""
    frequencies = inv_freq.to(positions.device, torch.float64)
    angles = positions.to(torch.float64)[..., None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return Rotary(torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype))


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply the rotary embedding: halves swapped, the sign already in the sines."""
    half = x.shape[-1] // 2
    rotated: Tensor = x * rotary.cos + torch.roll(x, half, dims=-1) * rotary.sin
    return rotated


def fuse(weights: DraftWeights, features: Tensor) -> Tensor:
    """Tapped features [..., F] to the draft's width [..., D]."""
    return F.linear(features, weights.fc)


def head(weights: DraftWeights, states: Tensor) -> Tensor:
    """Logits over the kept vocabulary, [..., D] -> [..., V]."""
    normed = F.rms_norm(states, (states.shape[-1],), weights.norm_D, weights.eps)
    return F.linear(normed, weights.head_VD)


def _heads(x: Tensor, weight: Tensor, head_size: int) -> Tensor:
    return F.linear(x, weight).unflatten(-1, (-1, head_size)).transpose(1, 2)


def _layer(
    weights: DraftWeights,
    index: int,
    inputs: Tensor,
    residual: Tensor,
    rotary: Rotary,
    kv: KeyValues,
    mask: Tensor | None,
    num_queries: int,
) -> Tensor:
    layer: LayerWeights = weights.layers[index]
    head_size = weights.head_size
    k = rotate(_heads(inputs, layer.k, head_size), rotary)
    v = _heads(inputs, layer.v, head_size)
    if num_queries < inputs.shape[1]:
        inputs, residual = inputs[:, -num_queries:], residual[:, -num_queries:]
        rotary = Rotary(rotary.cos[..., -num_queries:, :], rotary.sin[..., -num_queries:, :])
        mask = None if mask is None else mask[..., -num_queries:, :]
    q = rotate(_heads(inputs, layer.q, head_size), rotary)
    k, v = kv.update(index, k, v)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    hidden = residual + F.linear(mixed.transpose(1, 2).flatten(2), layer.o)
    normed = F.rms_norm(hidden, (hidden.shape[-1],), layer.post_norm_D, weights.eps)
    gated = F.silu(F.linear(normed, layer.gate)) * F.linear(normed, layer.up)
    return hidden + F.linear(gated, layer.down)


def forward_rows(
    weights: DraftWeights,
    embeddings_BTD: Tensor,
    features_BTD: Tensor,
    rotary: Rotary,
    kv: KeyValues,
    mask: Tensor | None,
    *,
    num_queries: int | None = None,
) -> Tensor:
    """Run rows through the draft's layers.

    Args:
        weights: The draft.
        embeddings_BTD: Embedding of each row's token (merged image embedding for image tokens).
        features_BTD: Fused target feature, or the draft's own state for self-fed rows.
        rotary: Of the rows' positions.
        kv: Holds what was there before and takes the rows' keys and values.
        mask: Additive or boolean mask broadcastable to [B, H, T, C + T]; None lets every row see
            every key, which is right for a single row.
        num_queries: States wanted of the last rows only; the rows before them still leave their
            keys and values in every layer, but are spared the last layer's queries and
            feed-forward.

    Returns:
        States before the final norm, [B, num_queries, D].
    """
    num_rows = embeddings_BTD.shape[1]
    hidden = features_BTD
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        size = (hidden.shape[-1],)
        if layer.hidden_norm_D is None:
            inputs = F.rms_norm(hidden, size, layer.input_norm_D, weights.eps)
        else:
            inputs = torch.cat(
                [
                    F.rms_norm(embeddings_BTD, size, layer.input_norm_D, weights.eps),
                    F.rms_norm(hidden, size, layer.hidden_norm_D, weights.eps),
                ],
                dim=-1,
            )
        queries = num_rows if index < last or num_queries is None else num_queries
        hidden = _layer(weights, index, inputs, hidden, rotary, kv, mask, queries)
    return hidden
