"""Lockstep replay of a bench arm: the same engine over what that very decoding recorded.

Shapes: T prompt and answer tokens, P prompt tokens, A rows of a round, F tapped features, D hidden,
M image tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dreams_nas.bench.arms import Arm, decode_arm, ready_arm
from dreams_nas.bench.measure import Prompt
from dreams_nas.core.config import Config
from dreams_nas.core.console import progress
from dreams_nas.decode.accept import clip_accepted
from dreams_nas.decode.engine import DecodeResult
from dreams_nas.features.recording import Recording
from dreams_nas.replay.lockstep import replay_lockstep
from dreams_nas.targets.protocol import Target, TargetInputs


class LockstepReport(Config):
    """Decoding against its own replay."""

    arm: str
    """Which arm."""
    acceptance_length: float | None
    """tau of the decoding that was recorded."""
    acceptance_length_replayed: float | None
    """tau of the replay; null without a round."""
    num_rounds: int
    """Rounds of the decoding."""
    num_rounds_differing: int
    """Rounds that propose other tokens or accept another number of them in the replay, missing or
    additional ones included."""


def build_recording(
    prompt_id: str, inputs: TargetInputs, result: DecodeResult, target_layer_ids: tuple[int, ...]
) -> Recording:
    """What a decoding felt, as replay reads it.

    Args:
        prompt_id: Id of the recording.
        inputs: The prompt.
        result: Decoded with `want_record`, by a draft that taps these layers.
        target_layer_ids: The tapped layers.
    """
    record = result.record
    assert record is not None, "decode with want_record=True"
    prefill = record.prefill
    answer = torch.tensor(result.tokens, dtype=torch.int64, device=inputs.input_ids_T.device)
    tokens_T = torch.cat([inputs.input_ids_T, answer])
    features = torch.cat([prefill.features_TF, *record.features])[: len(tokens_T)]
    # The last token was never a root, so nothing is known of its position, nor asked.
    missing = features.new_zeros(len(tokens_T) - len(features), features.shape[1])
    places_M = _image_places(inputs)
    importance = prefill.importance_T
    if importance is None:
        importance = torch.zeros(len(inputs.input_ids_T), device=inputs.input_ids_T.device)
    return Recording(
        id=prompt_id,
        tokens_T=tokens_T.cpu(),
        prompt_length=len(inputs.input_ids_T),
        image_spans=inputs.image_spans,
        target_layer_ids=target_layer_ids,
        features_TF=torch.cat([features, missing]).cpu(),
        image_embeddings_MD=prefill.embeddings_TD[places_M].cpu(),
        importance_M=importance[places_M].cpu(),
    )


def _image_places(inputs: TargetInputs) -> Tensor:
    """Positions of the image tokens of all images, in order."""
    spans = [torch.arange(start, stop) for start, stop in inputs.image_spans]
    places_M = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
    return places_M.to(inputs.input_ids_T.device)


def check_lockstep(
    target: Target,
    arm: Arm,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    quiet: bool = False,
) -> LockstepReport:
    """Decode once more with a record, replay that, and compare round by round.

    Args:
        target: The target.
        arm: A speculative arm.
        prompts: What to decode; one recording is held at a time.
        max_new_tokens: Most tokens of an answer.
        quiet: No progress.
    """
    ready = ready_arm(arm, target)
    assert ready.draft is not None, "plain decoding has nothing to replay"
    num_rounds = num_replayed = num_tokens = num_differing = 0
    with progress("replaying", len(prompts), quiet) as bar:
        for prompt in prompts:
            live = decode_arm(target, ready, prompt.inputs, max_new_tokens, want_record=True)
            bar.advance()
            if not live.rounds:
                continue
            recording = build_recording(
                prompt.id, prompt.inputs, live, ready.draft.target_layer_ids
            )
            replayed = replay_lockstep(target, ready.draft, arm.tree, recording)
            num_rounds += len(live.rounds)
            num_replayed += len(replayed.rounds)
            num_tokens += len(live.tokens) - 1
            num_differing += count_differing(live, replayed)
    return LockstepReport(
        arm=arm.name,
        acceptance_length=num_tokens / num_rounds if num_rounds else None,
        acceptance_length_replayed=num_tokens / num_replayed if num_replayed else None,
        num_rounds=num_rounds,
        num_rounds_differing=num_differing,
    )


def count_differing(live: DecodeResult, replayed: DecodeResult) -> int:
    """Rounds that differ in what they drafted or accepted."""
    sides = []
    for result in (live, replayed):
        accepted = clip_accepted([r.num_accepted for r in result.rounds], len(result.tokens))
        sides.append([(r.drafted, a) for r, a in zip(result.rounds, accepted, strict=True)])
    num_equal = sum(a == b for a, b in zip(*sides, strict=False))
    return max(len(side) for side in sides) - num_equal
