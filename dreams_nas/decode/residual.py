"""Accepting a chain whose tokens the draft drew at random, so that the target's law is kept.

`residual` is speculative sampling (Leviathan et al. 2023, Chen et al. 2023): each token stands or
falls alone. `block` is block verification (Sun et al. 2024): the chain is judged as a whole, and
never accepts less on average. Both end with a draw from what is left of the target's distribution.

Shapes: L drafted tokens, Q = L + 1 rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """How likely each length is kept, and what follows it."""

    accept_L: Tensor
    """Probability with which the test of each drafted token passes."""
    next_QV: Tensor
    """Distribution of the token after 0..L kept ones."""


def residual_verdict(tokens_L: Tensor, draft_LV: Tensor, target_QV: Tensor) -> Verdict:
    """Judge each token alone; a chain is kept up to its first test that fails."""
    return Verdict(_ratios(tokens_L, draft_LV, target_QV).clamp(max=1), _left(draft_LV, target_QV))


def block_verdict(tokens_L: Tensor, draft_LV: Tensor, target_QV: Tensor) -> Verdict:
    """Judge every beginning of a chain; it is kept up to its last test that passes."""
    num_drafted = len(tokens_L)
    if not num_drafted:
        return Verdict(target_QV.new_empty(0), target_QV)
    # w_i = min(w_{i-1} * ratio_i, 1) without a loop: a walk of logarithms, held below 0.
    walk_L = _ratios(tokens_L, draft_LV, target_QV).log().cumsum(dim=0)
    weight_L = (walk_L - walk_L.cummax(dim=0).values.clamp(min=0)).exp()
    before_L1 = torch.cat([weight_L.new_ones(1), weight_L[:-1]])[:, None]
    left_LV = (before_L1 * target_QV[:num_drafted] - draft_LV).clamp(min=0)
    mass_L = left_LV.sum(dim=-1)[1:]  # what is left after 1..L-1 kept tokens
    rest_L = mass_L + 1 - weight_L[:-1]
    middle_L = torch.where(rest_L > 0, mass_L / rest_L, torch.ones_like(rest_L))
    return Verdict(torch.cat([middle_L, weight_L[-1:]]), _normalised(left_LV, target_QV))


def _ratios(tokens_L: Tensor, draft_LV: Tensor, target_QV: Tensor) -> Tensor:
    """Target probability of each drafted token over the draft's, which drew it and so is not 0."""
    index_L1 = tokens_L[:, None]
    wanted_L = target_QV[: len(tokens_L)].gather(1, index_L1)[:, 0]
    return wanted_L / draft_LV.gather(1, index_L1)[:, 0]


def _left(draft_LV: Tensor, target_QV: Tensor) -> Tensor:
    """What the draft leaves of the target's distributions; the bonus row keeps all of its own."""
    return _normalised((target_QV[: len(draft_LV)] - draft_LV).clamp(min=0), target_QV)


def _normalised(left_LV: Tensor, target_QV: Tensor) -> Tensor:
    """Distributions of the rests; the target's own where rounding left none."""
    mass_L1 = left_LV.sum(dim=-1, keepdim=True)
    own_LV = target_QV[: len(left_LV)]
    return torch.cat(
        [torch.where(mass_L1 > 0, left_LV / mass_L1, own_LV), target_QV[len(left_LV) :]]
    )


def num_kept(verdict: Verdict, is_block: bool, generator: torch.Generator | None) -> Tensor:
    """Draw how many drafted tokens are kept, int64 scalar on the device."""
    accept_L = verdict.accept_L
    uniform_L = torch.rand(
        accept_L.shape, dtype=accept_L.dtype, device=accept_L.device, generator=generator
    )
    passed_L = uniform_L < accept_L
    if not is_block:
        return passed_L.to(torch.int64).cumprod(dim=0).sum()
    place_L = torch.arange(1, len(accept_L) + 1, device=accept_L.device)
    return (passed_L * place_L).amax()
