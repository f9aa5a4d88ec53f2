"""Recordings to right-aligned batches, for replay and for training.

The committed rows of a recording of T tokens are 0 .. T - 3: row t holds the target's feature of
position t and the token of position t + 1. Its roots are the answer tokens but for the last, after
which nothing is left to propose; the root at position s starts from row s - 1. At level d a root
proposes the token of position s + d, and the target's own distribution there is the head of the
last block's feature at position s + d - 1: one tensor, shifted, serves all levels.

Shapes: B batch, T tokens of a recording or committed rows of a batch, R roots, D hidden, F tapped
features, M image tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.draft.unroll import UnrollBatch, shift_left
from dreams_nas.draft.visual import kept_rows
from dreams_nas.features.recording import Recording

Embed = Callable[[Tensor], Tensor]
"""Token ids to input embeddings, the target's."""


@dataclass(frozen=True)
class AnswerBatch:
    """Rows of some recorded answers and the tokens that their roots should propose."""

    rows: UnrollBatch
    """What a draft reads."""
    next_tokens_BR: Tensor
    """Token after each root, int64: what it proposes at level 1."""
    states_BRD: Tensor
    """The target's last hidden state at each root, before the final norm: its head gives the
    distribution of the next token."""

    @property
    def num_levels(self) -> int:
        """Levels at which any root has a token left to propose."""
        return int(self.rows.num_roots_B.max())

    @property
    def is_root_BR(self) -> Tensor:
        """False in padding, boolean."""
        num_roots = self.next_tokens_BR.shape[1]
        index_R = torch.arange(num_roots, device=self.next_tokens_BR.device)
        return index_R >= (num_roots - self.rows.num_roots_B)[:, None]

    def has_token_BR(self, level: int) -> Tensor:
        """Whether the answer goes on for `level` tokens behind the root, boolean."""
        return shift_left(self.is_root_BR, level - 1) & self.is_root_BR

    def tokens_BR(self, level: int) -> Tensor:
        """Recorded token that each root should propose at a level, int64."""
        return shift_left(self.next_tokens_BR, level - 1)


def image_positions(recording: Recording) -> Tensor:
    """Positions of the image tokens, in order, [M]."""
    pieces = [torch.arange(start, stop) for start, stop in recording.image_spans]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def importance_by_position(recording: Recording) -> Tensor:
    """Importance of the prompt's positions, 0 at text, [P]: the form `kept_rows` reads."""
    importance_P = torch.zeros(recording.prompt_length, dtype=recording.importance_M.dtype)
    importance_P[image_positions(recording)] = recording.importance_M
    return importance_P


def prompt_rows(recording: Recording, keep_ratio: float) -> Tensor:
    """Rows of the prompt that a draft of this keep ratio holds, ascending, [rows]."""
    importance_P = importance_by_position(recording) if 0 < keep_ratio < 1 else None
    return kept_rows(recording.prompt_length, recording.image_spans, keep_ratio, importance_P)


def build_batch(
    recordings: Sequence[Recording],
    target_layer_ids: tuple[int, ...],
    keep_ratio: float,
    embed: Embed,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> AnswerBatch:
    """Batch recorded answers as one draft sees them.

    Args:
        recordings: Answers of two tokens or more each.
        target_layer_ids: Taps of the draft, ascending.
        keep_ratio: Share of the image tokens that the draft sees.
        embed: The target's token embedding.
        dtype: Of features and embeddings.
        device: Of everything in the batch.

    Raises:
        UserError: An answer of a single token, which leaves nothing to propose.
    """
    for recording in recordings:
        if recording.num_answer_tokens < 2:
            raise UserError(
                f"recording '{recording.id}' has an answer of {recording.num_answer_tokens} "
                "token(s); a draft is trained and replayed on answers of 2 or more: leave it out"
            )
    rows = [_committed_rows(recording, keep_ratio) for recording in recordings]
    num_rows = max(len(index) for index in rows)
    num_roots = max(recording.num_answer_tokens for recording in recordings) - 1
    size = (len(recordings), num_rows)
    tokens_BT = torch.zeros(size, dtype=torch.int64)
    positions_BT = torch.zeros(size, dtype=torch.int64)
    next_tokens_BR = torch.zeros(len(recordings), num_roots, dtype=torch.int64)
    features, states = [], []
    for sample, (recording, index) in enumerate(zip(recordings, rows, strict=True)):
        tokens_BT[sample, num_rows - len(index) :] = recording.tokens_T[index + 1]
        positions_BT[sample, num_rows - len(index) :] = index
        roots = slice(recording.prompt_length, -1)
        answer = recording.tokens_T[recording.prompt_length + 1 :]
        next_tokens_BR[sample, num_roots - len(answer) :] = answer
        features.append(_pad_left(recording.features(target_layer_ids)[index], num_rows, dtype))
        last = recording.features(recording.target_layer_ids[-1:])
        states.append(_pad_left(last[roots], num_roots, dtype))
    device = torch.device(device)
    tokens_BT = tokens_BT.to(device)
    embeddings_BTD = embed(tokens_BT).to(dtype)
    for sample, (recording, index) in enumerate(zip(recordings, rows, strict=True)):
        _merge_image(embeddings_BTD[sample, num_rows - len(index) :], recording, index)
    counts = [recording.num_answer_tokens - 1 for recording in recordings]
    return AnswerBatch(
        rows=UnrollBatch(
            embeddings_BTD=embeddings_BTD,
            features_BTF=torch.stack(features).to(device),
            positions_BT=positions_BT.to(device),
            num_rows_B=torch.tensor([len(index) for index in rows], device=device),
            num_roots_B=torch.tensor(counts, device=device),
            tokens_BR=tokens_BT[:, num_rows - num_roots :],
        ),
        next_tokens_BR=next_tokens_BR.to(device),
        states_BRD=torch.stack(states).to(device),
    )


def _committed_rows(recording: Recording, keep_ratio: float) -> Tensor:
    answer_rows = torch.arange(recording.prompt_length, len(recording.tokens_T) - 2)
    return torch.cat([prompt_rows(recording, keep_ratio), answer_rows])


def _pad_left(values: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(values.to(dtype), (0, 0, length - len(values), 0))


def _merge_image(embeddings_RD: Tensor, recording: Recording, rows_R: Tensor) -> None:
    """Write the merged image embeddings over the placeholders' rows, in place."""
    if not recording.image_spans:
        return
    image_of_T = torch.full((len(recording.tokens_T),), -1)
    image_of_T[image_positions(recording)] = torch.arange(len(recording.image_embeddings_MD))
    image_R = image_of_T[rows_R + 1]
    at = (image_R >= 0).nonzero().squeeze(1)
    merged = recording.image_embeddings_MD[image_R[at]]
    embeddings_RD[at.to(embeddings_RD.device)] = merged.to(embeddings_RD)


def length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group sequences of like length, so that padded batches hold at most `batch_tokens` tokens.

    A sequence longer than that is a batch of its own. Order within a length follows the index.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        # Ascending, so the newcomer sets the padded length.
        if batches and lengths[index] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
