"""What a draft is trained towards: the target's own next-token distribution along its answers.

The target's logits of a batch are computed once, in the draft's token order; every level and every
vocabulary prefix reads the same tensor. Positions whose recorded token is outside the kept
vocabulary have weight 0. All means are over supervised positions, sums over the vocabulary.

Shapes: B batch, R roots, N positions with a recorded next token, L levels, D hidden, V vocabulary
in the draft's order, W its kept prefix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dreams_nas.distill.fused_kl import fused_kl
from dreams_nas.distill.recipes import Recipe
from dreams_nas.draft.layers import head
from dreams_nas.draft.unroll import unroll
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.replay.batches import AnswerBatch, Embed


@dataclass(frozen=True)
class Supervision:
    """What the target says at every position of a batch that has a recorded next token."""

    flat_N: Tensor
    """Index of the position's own root in [B * R]."""
    num_before_N: Tensor
    """Roots of the same answer before it: level d is drafted there when this is d - 1 or more."""
    row_N: Tensor
    """Head row of the recorded next token, in the draft's order."""
    logits_NV: Tensor
    """The target's logits, in the draft's order."""
    states_ND: Tensor
    """The target's last hidden state, before its final norm."""


@torch.no_grad()
def build_supervision(
    batch: AnswerBatch,
    target_head: Callable[[Tensor], Tensor],
    vocab_order_V: Tensor,
    index_of_V: Tensor,
) -> Supervision:
    """Compute the target's logits of a batch, once for all levels and subnets.

    Args:
        batch: Recorded answers.
        target_head: Last hidden states to logits, `Target.head`.
        vocab_order_V: Target id of each head row of the largest draft.
        index_of_V: Its inverse (`index_in_order`).
    """
    at_BR = batch.is_root_BR
    num_roots = at_BR.shape[1]
    flat_N = at_BR.flatten().nonzero().squeeze(1)
    first_B = num_roots - batch.rows.num_roots_B
    states_ND = batch.states_BRD.flatten(0, 1)[flat_N]
    return Supervision(
        flat_N=flat_N,
        num_before_N=flat_N % num_roots - first_B[flat_N // num_roots],
        row_N=index_of_V[batch.next_tokens_BR.flatten()[flat_N]],
        logits_NV=target_head(states_ND).float().index_select(1, vocab_order_V),
        states_ND=states_ND,
    )


@dataclass(frozen=True)
class DraftLoss:
    """Loss of one draft on one batch."""

    total: Tensor
    """What is minimised; carries the gradient."""
    kl: Tensor
    """Mean KL over supervised positions, nats."""
    feature: Tensor | None
    """Mean SmoothL1 over supervised positions, where the recipe has it."""
    hits_NL: Tensor
    """Whether the draft's best guess was the recorded token; False where that is outside its
    vocabulary, boolean."""
    is_drafted_NL: Tensor
    """Whether the level is drafted at the position at all, boolean."""

    def accuracy(self) -> list[float | None]:
        """Share of right best guesses by level; None where no level is drafted."""
        hits, counts = self.hits_NL.sum(0).tolist(), self.is_drafted_NL.sum(0).tolist()
        return [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]


def position_weights(
    supervision: Supervision, num_vocab: int, level_weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Which levels are drafted at each position, and their weights in the loss, summing to 1.

    Returns:
        Boolean and float tensors, [N, L]. Without any supervised position the weights are 0.
    """
    row_N = supervision.row_N
    levels_L = torch.arange(len(level_weights), device=row_N.device)
    is_drafted_NL = supervision.num_before_N[:, None] >= levels_L
    weights_NL = is_drafted_NL * torch.tensor(level_weights, device=row_N.device)
    weights_NL = weights_NL * (row_N < num_vocab)[:, None]
    return is_drafted_NL, weights_NL / weights_NL.sum().clamp(min=1e-9)


def draft_loss(
    weights: DraftWeights,
    batch: AnswerBatch,
    supervision: Supervision,
    embed: Embed,
    recipe: Recipe,
) -> DraftLoss:
    """Unroll a draft over recorded answers and compare it with the target.

    Args:
        weights: The draft; its head rows are a prefix of the supervision's vocabulary.
        batch: The answers, with the features of the draft's taps.
        supervision: Of the same answers.
        embed: The target's token embedding.
        recipe: Levels and loss weights.
    """
    num_levels = min(recipe.num_unroll_levels, batch.num_levels)
    num_vocab = len(weights.head_VD)
    is_drafted_NL, weights_NL = position_weights(
        supervision, num_vocab, recipe.level_weights[:num_levels]
    )
    gathered = []
    for level, states_BRD in enumerate(unroll(weights, batch.rows, embed, num_levels)):
        # Roots that do not exist land somewhere; their weight is 0.
        at_N = (supervision.flat_N - level).clamp(min=0)
        gathered.append(states_BRD.flatten(0, 1).index_select(0, at_N))
    states_NLD = torch.stack(gathered, dim=1)
    # Autocast leaves half precision behind, in which neither norm nor softmax should be taken.
    states_NLD = states_NLD.to(torch.promote_types(states_NLD.dtype, torch.float32))
    normed_NLD = F.rms_norm(states_NLD, states_NLD.shape[-1:], weights.norm_D, weights.eps)
    kl, hits_NL = fused_kl(
        normed_NLD,
        weights.head_VD,
        supervision.logits_NV[:, :num_vocab],
        supervision.row_N,
        weights_NL,
        torch.bfloat16 if recipe.dtype == "bfloat16" else normed_NLD.dtype,
    )
    total, feature = recipe.kl_weight * kl, None
    if recipe.feature_weight:
        target_NLD = supervision.states_ND[:, None].to(states_NLD).expand_as(states_NLD)
        distance_NL = F.smooth_l1_loss(states_NLD, target_NLD, reduction="none").mean(dim=-1)
        feature = (distance_NL * weights_NL).sum()
        total = total + recipe.feature_weight * feature
    return DraftLoss(total, kl.detach(), feature, hits_NL & is_drafted_NL, is_drafted_NL)


def reference_kl(
    weights: DraftWeights,
    batch: AnswerBatch,
    target_head: Callable[[Tensor], Tensor],
    vocab_ids_W: Tensor,
    embed: Embed,
    level_weights: Sequence[float],
) -> Tensor:
    """The same KL, written to be read: sample by sample, level by level, root by root.

    `draft_loss` must give this value and this gradient; it is only allowed to be quicker.
    """
    states = list(unroll(weights, batch.rows, embed, len(level_weights)))
    total, mass = torch.zeros(()), 0.0
    num_roots = batch.next_tokens_BR.shape[1]
    for sample, own_roots in enumerate(batch.rows.num_roots_B.tolist()):
        for level, level_weight in enumerate(level_weights, start=1):
            for root in range(num_roots - own_roots, num_roots - (level - 1)):
                place = root + level - 1
                if batch.next_tokens_BR[sample, place] not in vocab_ids_W:
                    continue
                teacher = target_head(batch.states_BRD[sample, place])[vocab_ids_W]
                teacher_logp = teacher.log_softmax(dim=-1)
                student_logp = head(weights, states[level - 1][sample, root]).log_softmax(dim=-1)
                kl = (teacher_logp.exp() * (teacher_logp - student_logp)).sum()
                total = total + level_weight * kl
                mass += level_weight
    return total / mass


def chain_acceptance_length(loss: DraftLoss, supervision: Supervision, num_flat: int) -> float:
    """Tokens that a chain of the trained levels would gain per root, averaged over all roots.

    An estimate to watch: a walk visits other roots more often than this average does.

    Args:
        loss: Of one draft.
        supervision: Of the same batch.
        num_flat: B * R.
    """
    num_levels = loss.hits_NL.shape[1]
    hits = torch.zeros(num_flat, num_levels, device=loss.hits_NL.device)
    for level in range(num_levels):
        at = loss.is_drafted_NL[:, level]
        hits[(supervision.flat_N - level)[at], level] = loss.hits_NL[at, level].float()
    accepted = hits.cumprod(dim=1).sum()
    return 1.0 + float(accepted) / max(1, len(supervision.flat_N))
