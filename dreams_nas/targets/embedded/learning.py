"""What one training step of the embedded target computes: losses, probe, learning rates.

Shapes: B sequences, T tokens, M image tokens, D hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dreams_nas.targets.embedded.packing import (
    NO_LABEL,
    PROBE_SIZES,
    TrainingBatch,
    attention_mask,
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how fast the target learns; what the shipped weights saw is in their card."""

    vision_steps: int = 2000
    """Steps of the vision tower alone, with the probe."""
    vision_batch: int = 32
    """Pictures of such a step."""
    steps: int = 4800
    """Steps of the whole model."""
    batch: int = 3
    """Sequences of such a step."""
    max_tokens: int = 512
    """Longest sequence, in tokens, image tokens included."""
    warmup: int = 150
    """Steps over which a learning rate rises from 0, in both phases."""
    vision_rate: float = 1e-3
    """Peak learning rate of the vision tower alone."""
    rate: float = 1.5e-3
    """Peak learning rate of the decoder."""
    vision_share: float = 0.1
    """Learning rate of vision tower and projector in the second phase, as a share of ``rate``;
    at 0.3 they forgot what the first phase had taught (values read from patches: 80 % to 53 %)."""
    weight_decay: float = 0.05
    probe_weight: float = 0.2
    """Weight of the image probe's loss in the second phase."""
    text_probe_weight: float = 0.5
    """Weight of the decoder's probe and of the copying heads' loss at the start; it falls to 0
    along the second phase."""
    probe_batch: int = 12
    """Pictures a step of the second phase shows to the probe alone, beside its sequences."""
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
        return self.vision_share * self.rate * shape, self.rate * shape

    def probe_weights(self, step: int) -> tuple[float, float]:
        """Return the weights of the image probe and of the decoder's probe at a step."""
        done = max(0, step - self.vision_steps) / self.steps
        return self.probe_weight, self.text_probe_weight * (1 - done)

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
    """Return the projected image tokens [B, M, D] of pictures [B, 3, 96, 96], B = 0 included."""
    if not len(pixels):
        config = model.config
        return pixels.new_zeros(0, config.image_seq_length, config.text_config.hidden_size)
    output = model.get_image_features(pixel_values=pixels, return_dict=True)
    return torch.stack(list(output.pooler_output))


def answer_states(
    model: LlavaForConditionalGeneration, batch: TrainingBatch, features: Tensor
) -> tuple[Tensor, ...]:
    """Return the hidden states of a packed batch: merged embedding, then each block's output.

    The last entry is after the final norm; every entry is [B, T, D].
    """
    embedded = model.get_input_embeddings()(batch.ids)
    is_image = (batch.ids == model.config.image_token_id)[..., None]
    embedded = embedded.masked_scatter(is_image, features)
    output: tuple[Tensor, ...] = model.model.language_model(
        inputs_embeds=embedded,
        attention_mask=attention_mask(batch.groups, embedded.dtype),
        position_ids=batch.positions,
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    return output


def copy_loss(
    model: LlavaForConditionalGeneration, batch: TrainingBatch, states: tuple[Tensor, ...]
) -> tuple[Tensor, float]:
    """Return the loss of the guided heads, and how often they look at what is said next.

    Half the heads of five blocks are guided. In the first block a name in the prompt's list looks
    at its number, in the second a name in a question at the same name in the list. At three eighths
    of the depth what an answer says of a mark looks at where the question names it. At five and six
    eighths the token before a name looks at the piece in the list that is said next, and says it:
    what these heads write for that piece, read by final norm and head alone, is the piece.
    """
    decoder = model.model.language_model
    num_layers = len(decoder.layers)
    counted, _ = _guided(decoder, batch, states, 0, batch.numbers)
    matched, _ = _guided(decoder, batch, states, max(1, num_layers // 8), batch.matches)
    recalled, _ = _guided(decoder, batch, states, 3 * num_layers // 8, batch.asked)
    named = batch.sources != NO_LABEL
    wanted, pieces = batch.sources[named], batch.labels[named]
    rows = torch.nonzero(named)[:, 0]
    layers = (5 * num_layers // 8, 6 * num_layers // 8)
    total, right = counted + matched + recalled, 0.0
    for layer in layers:
        looked, seen = _guided(decoder, batch, states, layer, batch.sources)
        block = decoder.layers[layer]
        hidden = block.input_layernorm(states[layer][rows, wanted])
        copied = model.lm_head(decoder.norm(_written(block.self_attn, hidden)))
        total = total + (looked + F.cross_entropy(copied, pieces)) / len(layers)
        right += seen / len(layers)
    return total, right


def _guided(
    decoder: Any, batch: TrainingBatch, states: tuple[Tensor, ...], layer: int, sources: Tensor
) -> tuple[Tensor, float]:
    """Return the loss of half a block's heads against where they should look, and how often right.

    Args:
        decoder: the language model.
        batch: sequences.
        states: of ``answer_states``.
        layer: block.
        sources: position to look at [B, T], or ``NO_LABEL``.
    """
    block = decoder.layers[layer]
    hidden = block.input_layernorm(states[layer])
    query, key = _rotated_heads(decoder, block.self_attn, hidden, batch.positions)
    mask = attention_mask(batch.groups, hidden.dtype)[:, 0]
    scores, wanted = [], []
    for row, told in enumerate(sources != NO_LABEL):
        looked = query[row][:, told] @ key[row].transpose(-1, -2) * block.self_attn.scaling
        scores.append((looked + mask[row][told]).flatten(0, 1))
        wanted.append(sources[row][told].repeat(query.shape[1]))
    chosen, places = torch.cat(scores), torch.cat(wanted)
    if not len(places):
        return states[0].new_zeros(()), 0.0
    return F.cross_entropy(chosen, places), (chosen.argmax(-1) == places).float().mean().item()


def _written(attention: Any, hidden: Tensor) -> Tensor:
    """Return what the first half of an attention's heads write if they look at ``hidden`` only."""
    num_kept = attention.v_proj.out_features // 2
    value = attention.v_proj(hidden)[..., :num_kept].unflatten(-1, (-1, attention.head_dim))
    value = value.repeat_interleave(attention.num_key_value_groups, dim=-2).flatten(-2)
    return F.linear(value, attention.o_proj.weight[:, : value.shape[-1]])


def _rotated_heads(
    decoder: Any, attention: Any, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return queries and keys [B, H / 2, T, E] of the first half of an attention's heads."""
    size = attention.head_dim
    query, key = (
        projection(hidden)[..., : projection.out_features // 2]
        .unflatten(-1, (-1, size))
        .transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *decoder.rotary_emb(hidden, positions))
    return query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


_TEXT_FIGURES = ("knows place", "colour", "value", "says place", "of colour", "of value")
"""What the accuracies of ``TextProbe`` are called in progress lines."""


class TextProbe(nn.Module):
    """Linear probes inside the decoder: which mark a token is about, and what it looks like.

    A name in the prompt knows its place after a quarter of the blocks, and in the list colour and
    value of its mark after half of them; what an answer says next is known a quarter later. So the
    decoder reads the picture into the list first, and finds in the list what it is asked for.
    Thrown away after training.
    """

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        quarter = num_layers // 4
        self.layers = (quarter, 2 * quarter, 2 * quarter, 2 * quarter, 3 * quarter, 3 * quarter)
        self.heads = nn.ModuleList([nn.Linear(hidden_size, size) for size in PROBE_SIZES[:3] * 2])

    def loss(self, states: tuple[Tensor, ...], batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the accuracy of each head: known of the prompt, then told next.

        Args:
            states: of ``answer_states``.
            batch: sequences.
        """
        total = states[0].new_zeros(())
        right = []
        wanted = torch.cat([batch.known, batch.told], dim=-1)
        for i, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            about = wanted[..., i] != NO_LABEL
            hidden = F.rms_norm(states[layer][about], states[layer].shape[-1:])
            logits, labels = head(hidden), wanted[about][:, i]
            if len(labels):
                total = total + F.cross_entropy(logits, labels)
            right.append((logits.argmax(-1) == labels).float().mean().detach())
        return 2 * total / len(self.heads), torch.stack(right)


def step_loss(
    model: LlavaForConditionalGeneration,
    probes: tuple[Probe, TextProbe],
    batch: TrainingBatch,
    extra: tuple[Tensor, Tensor],
    weights: tuple[float, float],
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a packed batch and its figures.

    Args:
        model: the target.
        probes: on the image tokens of the batch and of ``extra``, and inside the decoder.
        batch: sequences.
        extra: pictures [B, 3, 96, 96] for the probe alone and their targets [B, M, 4].
        weights: weight of the image probe, and of the decoder's probe and copying heads.
    """
    num_images = len(batch.pixels)
    seen = image_features(model, torch.cat([batch.pixels, extra[0]]))
    states = answer_states(model, batch, seen[:num_images])
    supervised = batch.labels != NO_LABEL
    logits, labels = model.lm_head(states[-1][supervised]), batch.labels[supervised]
    loss = F.cross_entropy(logits, labels)
    targets = torch.cat([batch.patch_targets, extra[1]])
    seen_loss, seen_right = probes[0].loss(seen, targets)
    told_loss, told_right = probes[1].loss(states, batch)
    copied_loss, copied_right = copy_loss(model, batch, states)
    figures = {
        "answer": loss.item(),
        "right": (logits.argmax(-1) == labels).float().mean().item(),
        **dict(zip(_TEXT_FIGURES, told_right.tolist(), strict=True)),
        "copied": copied_right,
        "seen": seen_right[2].item(),
    }
    return loss + weights[0] * seen_loss + weights[1] * (told_loss + copied_loss), figures
