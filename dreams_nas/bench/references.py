"""Reference arms: transformers' own greedy `generate`, plain and with prompt lookup.

They run the same model object on the same prompts. The first target pass counts as the prefill,
everything after it as decoding, as for our own arms; prompt lookup verifies its first guesses in
that pass already, and is not charged for the tokens it gains there.
"""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from dreams_nas.core.errors import UserError
from dreams_nas.decode.engine import DecodeResult, Round
from dreams_nas.features.answers import neutral_generation
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import Target, TargetInputs

GENERATE_NAME = "generate"
LOOKUP_NAME = "prompt_lookup"
NUM_LOOKUP_TOKENS = 10
"""Longest continuation that prompt lookup proposes: what transformers' own examples use."""

_SETTINGS: dict[str, dict[str, Any]] = {
    GENERATE_NAME: {},
    LOOKUP_NAME: {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS},
}
REFERENCE_NAMES = tuple(_SETTINGS)


class _Stamps(StoppingCriteria):  # type: ignore[misc]
    """Notes when each target pass ended and how many tokens there were; never stops."""

    def __init__(self, num_prompt_tokens: int, device: torch.device) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self._num_prompt_tokens, self._device = num_prompt_tokens, device

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.times.append(_now(self._device))
        self.counts.append(input_ids.shape[1] - self._num_prompt_tokens)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def decode_reference(
    target: Target, name: str, inputs: TargetInputs, max_new_tokens: int
) -> DecodeResult:
    """Decode one prompt greedily as transformers does.

    Args:
        target: A model of transformers.
        name: One of `REFERENCE_NAMES`.
        inputs: The prompt.
        max_new_tokens: Most tokens to generate, 1 or more.

    Raises:
        UserError: The target is no model of transformers, or this model cannot decode that way.
    """
    if not isinstance(target, HuggingFaceTarget):
        raise UserError(f"arm '{name}' needs a target of transformers")
    batch, _ = target.collate([inputs])
    num_prompt_tokens = len(inputs.input_ids_T)
    stamps = _Stamps(num_prompt_tokens, target.device)
    stops = list(target.spec.eos_token_ids)
    start = _now(target.device)
    try:
        with neutral_generation(target.model):
            ids = target.model.generate(
                **batch,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=stops or None,
                pad_token_id=stops[0] if stops else 0,
                stopping_criteria=StoppingCriteriaList([stamps]),
                **_SETTINGS[name],
            )
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"transformers cannot decode '{target.spec.name}' as arm '{name}' ({error}); leave "
            "that arm out"
        ) from error
    tokens = ids[0, num_prompt_tokens:].tolist()
    passes = zip(stamps.times, stamps.times[1:], stamps.counts, stamps.counts[1:], strict=False)
    rounds = [
        Round((), tuple(range(count - before - 1)), end - begin)
        for begin, end, before, count in passes
    ]
    return DecodeResult(
        tokens=tokens,
        rounds=rounds,
        prefill_s=stamps.times[0] - start,
        decode_s=sum(done.seconds for done in rounds),
        stopped=bool(tokens) and tokens[-1] in stops,
    )
