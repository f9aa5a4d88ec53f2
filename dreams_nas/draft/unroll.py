"""Drafting along recorded answers: all roots and levels in one pass, for training and replay.

For a root at position s, level 1 comes from its committed row s - 1. The self-fed row of level
d >= 2 (the recorded token of position s + d - 1, the state of level d - 1) attends to committed
rows <= s - 1 and to its own self-fed rows of levels 2..d, nothing else: exactly what happens when
the drafted tokens are the recorded ones (training-time test of EAGLE-3, arXiv 2503.01840).

Layout: sequences are right-aligned, so that the last R rows of each are its roots.
Shapes: B batch, T committed rows, R roots, D hidden, F tapped features, K key/value heads, E head
size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dreams_nas.draft.layers import build_rotary, forward_rows, fuse
from dreams_nas.draft.weights import DraftWeights


@dataclass(frozen=True)
class UnrollBatch:
    """Recorded answers, right-aligned."""

    embeddings_BTD: Tensor
    """Embedding of each committed row's token."""
    features_BTF: Tensor
    """Tapped target features of each committed row."""
    positions_BT: Tensor
    """Position of each row in the original sequence, int64; anything in padding."""
    num_rows_B: Tensor
    """Committed rows of each sample; those before them are padding."""
    num_roots_B: Tensor
    """Roots of each sample: its answer tokens."""
    tokens_BR: Tensor
    """Token of each root's position, int64; root r of R is committed row T - R + r's token."""


def unroll_mask(num_rows_B: Tensor, num_rows: int, num_roots: int, level: int) -> Tensor:
    """What each root's row of a level sees, boolean [B, 1, R, T + (level - 1) * R].

    Args:
        num_rows_B: Committed rows of each sample, right-aligned.
        num_rows: T, padding included.
        num_roots: R.
        level: Level whose rows ask; level 1 are the committed rows themselves.
    """
    device = num_rows_B.device
    rows_T = torch.arange(num_rows, device=device)
    roots_R1 = torch.arange(num_rows - num_roots, num_rows, device=device)[:, None]
    valid_B1T = rows_T >= (num_rows - num_rows_B)[:, None, None]
    committed_BRT = (rows_T <= roots_R1) & valid_B1T
    own_RR = torch.eye(num_roots, dtype=torch.bool, device=device)
    own_BRS = own_RR.repeat(1, level - 1).expand(len(num_rows_B), -1, -1)
    mask = torch.cat([committed_BRT, own_BRS], dim=2)
    # Roots in padding see themselves, so that their softmax is not taken over nothing.
    mask[:, :, num_rows - num_roots : num_rows] |= own_RR
    return mask[:, None]


def committed_mask(num_rows_B: Tensor, num_rows: int) -> Tensor:
    """Causal mask of right-aligned committed rows, boolean [B, 1, T, T]."""
    return unroll_mask(num_rows_B, num_rows, num_rows, 1)


class _UnrollKeyValues:
    """Keeps every level's keys and values; differentiable, so nothing is written in place."""

    def __init__(self) -> None:
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}

    def update(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self._k:
            k_BKTE = torch.cat([self._k[layer], k_BKTE], dim=2)
            v_BKTE = torch.cat([self._v[layer], v_BKTE], dim=2)
        self._k[layer], self._v[layer] = k_BKTE, v_BKTE
        return k_BKTE, v_BKTE


def shift_left(values_BR: Tensor, by: int) -> Tensor:
    """Values `by` roots later, zeros behind the end: what root r sees `by` positions on."""
    if by == 0:
        return values_BR
    out = torch.zeros_like(values_BR)
    if by < values_BR.shape[1]:
        out[:, :-by] = values_BR[:, by:]
    return out


def unroll(
    weights: DraftWeights,
    batch: UnrollBatch,
    embed: Callable[[Tensor], Tensor],
    num_levels: int,
) -> Iterator[Tensor]:
    """Draft states of every root, level by level, before the final norm, [B, R, D] each.

    Args:
        weights: The draft.
        batch: Recorded answers; its features are of the draft's own taps.
        embed: Token ids to input embeddings, the target's.
        num_levels: Levels to yield, the committed one included.
    """
    num_roots, num_rows = batch.tokens_BR.shape[1], batch.positions_BT.shape[1]
    dtype = batch.features_BTF.dtype
    kv = _UnrollKeyValues()
    states_BRD = forward_rows(
        weights,
        batch.embeddings_BTD,
        fuse(weights, batch.features_BTF),
        build_rotary(weights.inv_freq, batch.positions_BT[:, None], dtype),
        kv,
        committed_mask(batch.num_rows_B, num_rows),
        num_queries=num_roots,
    )
    yield states_BRD
    positions_BR = batch.positions_BT[:, num_rows - num_roots :]
    for level in range(2, num_levels + 1):
        states_BRD = forward_rows(
            weights,
            embed(shift_left(batch.tokens_BR, level - 1)),
            states_BRD,
            build_rotary(weights.inv_freq, (positions_BR + level - 1)[:, None], dtype),
            kv,
            unroll_mask(batch.num_rows_B, num_rows, num_roots, level),
        )
        yield states_BRD
