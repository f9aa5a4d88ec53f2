"""Which image tokens matter to the text after them: attention mass in one block of the target.

Shapes: T prompt tokens, R text rows of a chunk, I images, H query heads, K key/value heads, G query
heads per key/value head, E head size, D hidden.

A variant of the score in DREAM (attention of later tokens, attention sinks removed), computed
beside the forward from the block's own queries and keys, so that fast attention kernels stay on.
"""

from typing import Any

import torch
from torch import Tensor

from dreams_nas.targets.protocol import TargetInputs

_MAX_MAP_ELEMENTS = 2**22
_NUM_STEPS = 10_000


def block_queries_keys(attention: Any, states_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Any:
    """Rotated queries [H, T, E] and keys [K, T, E] of a block, as its own forward computes them."""
    shape = (states_TD.shape[0], -1, attention.head_dim)
    rotated = []
    for projection, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
        x_XTE = getattr(attention, projection)(states_TD).view(shape).transpose(0, 1)
        if hasattr(attention, norm):
            x_XTE = getattr(attention, norm)(x_XTE)
        first, second = x_XTE.chunk(2, dim=-1)
        rotated.append(x_XTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE)
    return tuple(rotated)


def attention_mass(
    q_HTE: Tensor, k_KTE: Tensor, scale: float, window: int | None, inputs: TargetInputs
) -> Tensor:
    """Mean attention that each position gets from the text after each image.

    The mean goes over heads and over the text tokens behind the image; the mass on the first
    token (an attention sink) is taken away and the rest of each row renormalised. Rows are worked
    off in chunks, so that no map of all rows and heads exists at once.

    Args:
        q_HTE: Rotated queries of the prompt.
        k_KTE: Rotated keys of the prompt.
        scale: Factor on the scores before the softmax.
        window: Sliding window of the block, tokens; None sees everything before.
        inputs: The prompt; its image spans say what "after" means.

    Returns:
        [I, T], rows summing to 1, or 0 for an image that no text follows.
    """
    assert inputs.image_mask_T is not None
    dtype = torch.promote_types(q_HTE.dtype, torch.float32)
    num_tokens = k_KTE.shape[1]
    groups = (len(k_KTE), len(q_HTE) // len(k_KTE))
    positions_T = torch.arange(num_tokens, device=k_KTE.device)
    stops_I = torch.tensor([stop for _, stop in inputs.image_spans], device=k_KTE.device)
    is_after_T = ~inputs.image_mask_T & (positions_T >= stops_I.min())
    text_R = is_after_T.nonzero()[:, 0]
    k_K1ET = k_KTE.to(dtype).transpose(1, 2)[:, None]
    sums_IT = torch.zeros(len(stops_I), num_tokens, dtype=dtype, device=k_KTE.device)
    for rows_R in text_R.split(max(1, _MAX_MAP_ELEMENTS // (len(q_HTE) * num_tokens))):
        q_KGRE = q_HTE[:, rows_R].to(dtype).unflatten(0, groups)
        distance_RT = rows_R[:, None] - positions_T
        is_hidden_RT = (distance_RT < 0) | (positions_T == 0)
        if window is not None:
            is_hidden_RT |= distance_RT >= window
        scores_KGRT = (q_KGRE @ k_K1ET) * scale
        scores_KGRT = scores_KGRT.masked_fill(is_hidden_RT, float("-inf"))
        mass_RT = scores_KGRT.softmax(-1).mean((0, 1))
        sums_IT += (rows_R >= stops_I[:, None]).to(dtype) @ mass_RT
    num_rows_I = (text_R >= stops_I[:, None]).sum(1)
    return sums_IT / num_rows_I.clamp_min(1)[:, None]


def round_per_image(mass_IT: Tensor, inputs: TargetInputs) -> Tensor:
    """Share of the most looked-at token of the same image, in steps of 1e-4; 0 elsewhere, [T].

    Rounding makes the order of tokens independent of batch and kernel; what is left equal is
    ordered by index.
    """
    assert inputs.image_mask_T is not None
    importance_T = torch.zeros(mass_IT.shape[1], dtype=torch.float32, device=mass_IT.device)
    for mass_T, (start, stop) in zip(mass_IT, inputs.image_spans, strict=True):
        shares_M = mass_T[start:stop] * inputs.image_mask_T[start:stop]
        shares_M = shares_M / shares_M.max().clamp_min(torch.finfo(mass_T.dtype).tiny)
        importance_T[start:stop] = (shares_M * _NUM_STEPS).round() / _NUM_STEPS
    return importance_T
