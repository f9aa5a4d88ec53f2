"""From a step's answers to the losses of its drafts: what both trainings share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dreams_nas.distill.losses import (
    DraftLoss,
    Supervision,
    build_supervision,
    chain_acceptance_length,
    draft_loss,
)
from dreams_nas.distill.recipes import Recipe
from dreams_nas.distill.sampling import BatchSampler, Recordings, usable_lengths
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.features.recording import Recording
from dreams_nas.replay.batched import index_in_order
from dreams_nas.replay.batches import AnswerBatch, build_batch
from dreams_nas.targets.protocol import Target


class AnswerData:
    """Recorded answers, batched, with what the target says at each of their positions."""

    def __init__(
        self,
        recordings: Recordings,
        target: Target,
        vocab_order: Tensor,
        recipe: Recipe,
        seed: int,
    ) -> None:
        """Prepare batches.

        Args:
            recordings: Answers of two tokens or more.
            target: For its embedding and head.
            vocab_order: Target id of each head row of the (largest) draft.
            recipe: Levels, loss weights and batch size.
            seed: Of the order.
        """
        self._recordings, self._target, self._recipe = recordings, target, recipe
        self._vocab_order = vocab_order.to(target.device)
        num_ids = target.spec.dims.vocab
        index_of = index_in_order(self._vocab_order)
        # Ids that the order leaves out are behind every prefix.
        self._index_of_V = torch.full((num_ids,), num_ids, device=target.device)
        self._index_of_V[: len(index_of)] = index_of
        self._sampler = BatchSampler(usable_lengths(recordings), recipe.batch_tokens, seed)

    def batch(self, index: int) -> "AnswerStep":
        """Answers of the batch of that index."""
        chosen = [self._recordings[i] for i in self._sampler.batch(index)]
        return AnswerStep(self, chosen)

    def build(
        self, recordings: Sequence[Recording], layer_ids: tuple[int, ...], keep_ratio: float
    ) -> AnswerBatch:
        """Batch some answers as one draft sees them."""
        return build_batch(
            recordings, layer_ids, keep_ratio, self.embed, device=self._target.device
        )

    def supervise(self, batch: AnswerBatch) -> Supervision:
        """What the target says along them."""
        return build_supervision(batch, self._head, self._vocab_order, self._index_of_V)

    def loss(
        self, weights: DraftWeights, batch: AnswerBatch, supervision: Supervision
    ) -> DraftLoss:
        """Loss of one draft."""
        return draft_loss(weights, batch, supervision, self.embed, self._recipe)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding, in float32."""
        with torch.no_grad():
            return self._target.embed(tokens).float()

    def _head(self, states: Tensor) -> Tensor:
        return self._target.head(states.to(self._target.dtype))


@dataclass
class AnswerStep:
    """One step's answers; batches and supervision are shared by the drafts that can share them."""

    data: AnswerData
    recordings: list[Recording]
    _batches: dict[tuple[tuple[int, ...], float], AnswerBatch] = field(default_factory=dict)
    _supervision: Supervision | None = None

    def loss(
        self, weights: DraftWeights, layer_ids: tuple[int, ...], keep_ratio: float
    ) -> DraftLoss:
        """Loss of a draft that reads these taps and this share of the image tokens."""
        batch = self._batch(layer_ids, keep_ratio)
        return self.data.loss(weights, batch, self._supervise(batch))

    def metrics(self, name: str, loss: DraftLoss) -> dict[str, float]:
        """What the log shows of a loss."""
        assert self._supervision is not None, "metrics follow the loss"
        num_flat = next(iter(self._batches.values())).next_tokens_BR.numel()
        shown = {f"{name}kl": float(loss.kl)}
        if loss.feature is not None:
            shown[f"{name}feature"] = float(loss.feature.detach())
        for level, share in enumerate(loss.accuracy(), start=1):
            if share is not None:
                shown[f"{name}accuracy_{level}"] = share
        tau = chain_acceptance_length(loss, self._supervision, num_flat)
        return {**shown, f"{name}acceptance_estimate": tau}

    def _batch(self, layer_ids: tuple[int, ...], keep_ratio: float) -> AnswerBatch:
        key = (layer_ids, keep_ratio)
        if key not in self._batches:
            self._batches[key] = self.data.build(self.recordings, *key)
        return self._batches[key]

    def _supervise(self, batch: AnswerBatch) -> Supervision:
        # The roots are the same whatever the draft sees.
        if self._supervision is None:
            self._supervision = self.data.supervise(batch)
        return self._supervision
