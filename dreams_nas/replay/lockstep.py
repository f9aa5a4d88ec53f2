"""Lockstep replay: the decode engine itself, with recorded answers in the target's place.

It is the oracle of replay: whatever the engine does in a round, it does here. Batched replay must
agree with it, and it must agree with decoding.

Shapes: T tokens of the recording, P prompt tokens, Q verified rows, F tapped features, D hidden,
V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreams_nas.decode.drafting import ReadyDraft
from dreams_nas.decode.engine import DecodeResult, build_plan, decode
from dreams_nas.features.recording import Recording
from dreams_nas.replay.batches import image_positions, importance_by_position, prompt_rows
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import Walk
from dreams_nas.targets.protocol import (
    PrefillOutput,
    Target,
    TargetCache,
    TargetInputs,
    VerifyOutput,
)


class ReplayCache:
    """Counts committed rows; there is nothing to keep."""

    def __init__(self, capacity: int) -> None:
        """An empty cache that may count up to `capacity` rows."""
        self.capacity = capacity
        self.length = 0

    def commit(self, rows: Sequence[int]) -> None:
        """Count these rows as committed."""
        self.length += len(rows)
        assert self.length <= self.capacity, f"{self.length} rows in a cache of {self.capacity}"


class ReplayTarget:
    """The `Target` protocol over one recording.

    Every row answers with the recorded token that follows its position, whatever its own token is:
    rows off the recorded path are never accepted, because their parents said something else.
    """

    def __init__(self, target: Target, recording: Recording) -> None:
        """Answer from `recording`; embedding and head are the real target's."""
        self.spec = target.spec
        self.device = target.device
        self.dtype = target.dtype
        self._target = target
        self._recording = recording

    def inputs(self) -> TargetInputs:
        """The recorded prompt; `prefill` reads nothing but its length."""
        recording = self._recording
        mask_P = torch.zeros(recording.prompt_length, dtype=torch.bool, device=self.device)
        mask_P[image_positions(recording)] = True
        return TargetInputs(
            input_ids_T=recording.tokens_T[: recording.prompt_length].to(self.device),
            image_spans=recording.image_spans,
            image_mask_T=mask_P if recording.image_spans else None,
        )

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any] = ()
    ) -> TargetInputs:
        """As the real target."""
        return self._target.prepare(messages, images)

    def build_cache(self, capacity: int) -> ReplayCache:
        """A counter."""
        return ReplayCache(capacity)

    def prefill(
        self,
        inputs: TargetInputs,
        cache: TargetCache,
        *,
        target_layer_ids: Sequence[int] = (),
        want_importance: bool = False,
    ) -> PrefillOutput:
        """What was recorded of the prompt."""
        recording, length = self._recording, self._recording.prompt_length
        assert len(inputs.input_ids_T) == length, "a recording answers its own prompt only"
        cache.commit(range(length))
        embeddings_PD = self.embed(inputs.input_ids_T).clone()
        embeddings_PD[image_positions(recording)] = recording.image_embeddings_MD.to(embeddings_PD)
        importance_P = None
        if want_importance and recording.image_spans:
            importance_P = importance_by_position(recording).to(self.device)
        return PrefillOutput(
            logits_V=self._logits(torch.tensor([length - 1]))[0],
            features_TF=self._features(slice(0, length), target_layer_ids),
            embeddings_TD=embeddings_PD,
            importance_T=importance_P,
        )

    def verify(
        self,
        tokens_Q: Tensor,
        depths_Q: Tensor,
        mask_QQ: Tensor | None,
        cache: TargetCache,
        *,
        target_layer_ids: Sequence[int] = (),
    ) -> VerifyOutput:
        """What was recorded at the rows' positions; behind the end, nothing that was drafted."""
        last = len(self._recording.tokens_T) - 1
        positions_Q = (cache.length + depths_Q).clamp(max=last).to("cpu")
        drafted = set(tokens_Q.tolist())
        other = next(token for token in range(len(drafted) + 1) if token not in drafted)
        return VerifyOutput(
            self._logits(positions_Q, other), self._features(positions_Q, target_layer_ids)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """As the real target."""
        return self._target.embed(tokens)

    def head(self, states: Tensor) -> Tensor:
        """As the real target."""
        return self._target.head(states)

    @property
    def head_weight_VD(self) -> Tensor:
        """As the real target."""
        return self._target.head_weight_VD

    @property
    def inv_freq(self) -> Tensor:
        """As the real target."""
        return self._target.inv_freq

    def decode_text(self, tokens: Sequence[int]) -> str:
        """As the real target."""
        return self._target.decode_text(tokens)

    def _logits(self, positions_Q: Tensor, after_end: int = 0) -> Tensor:
        """Certainty about the recorded next token of each position, [Q, V]."""
        tokens_T = self._recording.tokens_T
        next_T = torch.cat([tokens_T[1:], torch.tensor([after_end])])
        size = (len(positions_Q), self.spec.dims.vocab)
        logits_QV = torch.zeros(size, dtype=self.dtype, device=self.device)
        next_Q1 = next_T[positions_Q].to(self.device)[:, None]
        return logits_QV.scatter_(1, next_Q1, 1.0)

    def _features(self, positions: Tensor | slice, target_layer_ids: Sequence[int]) -> Tensor:
        if not target_layer_ids:  # plain decoding reads none
            positions_Q = torch.arange(len(self._recording.tokens_T))[positions]
            return torch.zeros(len(positions_Q), 0, dtype=self.dtype, device=self.device)
        columns_TF = self._recording.features(tuple(target_layer_ids))
        return columns_TF[positions].to(self.device, self.dtype)


def replay_lockstep(
    target: Target, draft: ReadyDraft, tree: StaticTree, recording: Recording
) -> DecodeResult:
    """Decode a recorded answer again, reading the target from the recording.

    Args:
        target: The real target, for its embedding.
        draft: The draft, bound to it.
        tree: The draft tree, not empty.
        recording: The answer; `features` of the draft's taps are needed.

    Returns:
        As decoding; the tokens equal the recorded ones, and seconds mean nothing.
    """
    replayed = ReplayTarget(target, recording)
    result = decode(
        replayed,
        replayed.inputs(),
        max_new_tokens=recording.num_answer_tokens,
        draft=draft,
        plan=build_plan(tree, target),
        stop_ids=(),  # the recording knows its own end
    )
    recorded = recording.tokens_T[recording.prompt_length :].tolist()
    assert result.tokens == recorded, f"replay of '{recording.id}' left the recorded answer"
    return result


def lockstep_walk(
    target: Target, draft: ReadyDraft, tree: StaticTree, recordings: Sequence[Recording]
) -> Walk:
    """The rounds that the engine takes over recorded answers."""
    prompts, roots, accepted = [], [], []
    for prompt, recording in enumerate(recordings):
        root = 0
        for decoded in replay_lockstep(target, draft, tree, recording).rounds:
            prompts.append(prompt)
            roots.append(root)
            accepted.append(decoded.num_accepted)
            root += decoded.num_accepted + 1
    kept = [len(prompt_rows(recording, draft.keep_ratio)) for recording in recordings]
    return Walk(
        prompt_N=np.array(prompts, dtype=np.int64),
        root_N=np.array(roots, dtype=np.int64),
        accepted_N=np.array(accepted, dtype=np.int64),
        answer_lengths_P=np.array([r.num_answer_tokens for r in recordings], dtype=np.int64),
        prompt_lengths_P=np.array([r.prompt_length for r in recordings], dtype=np.int64),
        kept_rows_P=np.array(kept, dtype=np.int64),
    )
