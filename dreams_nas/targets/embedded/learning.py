"""What one training step of the embedded target computes: losses, probe, learning rates.

Shapes: B sequences, T tokens, M image tokens, D hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from dreams_nas.targets.embedded.packing import (
    NO_LABEL,
    PROBE_SIZES,
    TrainingBatch,
    attention_mask,
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how fast the target learns; the defaults are those of the shipped weights."""

    vision_steps: int = 1200
    """Steps of the vision tower alone, with the probe."""
    vision_batch: int = 32
    """Pictures of such a step."""
    steps: int = 2600
    """Steps of the whole model."""
    batch: int = 3
    """Sequences of such a step."""
    max_tokens: int = 512
    """Longest sequence, in tokens, image tokens included."""
    warmup: int = 150
    """Steps over which a learning rate rises from 0, in both phases."""
    vision_rate: float = 1e-3
    """Peak learning rate of the vision tower alone."""
    rate: float = 2e-3
    """Peak learning rate of the decoder; vision tower and projector learn at 0.3 of it."""
    weight_decay: float = 0.05
    probe_weight: float = 0.1
    """Weight of the probe's loss in the second phase."""
    clip: float = 1.0
    """Largest gradient norm."""
    seed: int = 0

    @property
    def total_steps(self) -> int:
        """Steps of both phases."""
        return self.vision_steps + self.steps

    def rates(self, step: int) -> tuple[float, float]:
        """Return the learning rates of (vision tower and projector, decoder) at a step."""
        if step < self.vision_steps:
            return self.vision_rate * self._shape(step, self.vision_steps, 0.1), 0.0
        shape = self._shape(step - self.vision_steps, self.steps, 0.02)
        return 0.3 * self.rate * shape, self.rate * shape

    def _shape(self, step: int, total: int, floor: float) -> float:
        rise = min(1.0, (step + 1) / max(1, min(self.warmup, total // 4)))
        return rise * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / total)))


class Probe(nn.Module):
    """Linear probes on the projected image tokens: place, colour, value and kind of the mark."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(hidden_size, size) for size in PROBE_SIZES])

    def loss(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the accuracy of each head, for [B, M, D] and [B, M, 4]."""
        total = features.new_zeros(())
        right = []
        for i, head in enumerate(self.heads):
            logits, wanted = head(features).flatten(0, 1), targets[..., i].flatten()
            total = total + F.cross_entropy(logits, wanted)
            right.append((logits.argmax(-1) == wanted).float().mean().detach())
        return total, torch.stack(right)


def image_features(model: LlavaForConditionalGeneration, pixels: Tensor) -> Tensor:
    """Return the projected image tokens [B, M, D] of pictures [B, 3, 96, 96]."""
    output = model.get_image_features(pixel_values=pixels, return_dict=True)
    return torch.stack(list(output.pooler_output))


def answer_logits(
    model: LlavaForConditionalGeneration, batch: TrainingBatch, features: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits and labels [supervised positions, V] of a packed batch."""
    embedded = model.get_input_embeddings()(batch.ids)
    if features is not None:
        is_image = (batch.ids == model.config.image_token_id)[..., None]
        embedded = embedded.masked_scatter(is_image, features)
    states = model.model.language_model(
        inputs_embeds=embedded,
        attention_mask=attention_mask(batch.groups),
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    supervised = batch.labels != NO_LABEL
    return model.lm_head(states[supervised]), batch.labels[supervised]


def step_loss(
    model: LlavaForConditionalGeneration, probe: Probe, batch: TrainingBatch, probe_weight: float
) -> tuple[Tensor, float]:
    """Return the loss of a packed batch and the share of answer tokens that are right."""
    features = image_features(model, batch.pixels) if batch.pixels.numel() else None
    logits, labels = answer_logits(model, batch, features)
    loss = F.cross_entropy(logits, labels)
    accuracy = (logits.argmax(-1) == labels).float().mean().item()
    if features is not None and probe_weight:
        loss = loss + probe_weight * probe.loss(features, batch.patch_targets)[0]
    return loss, accuracy
