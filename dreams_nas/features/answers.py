"""The target's own greedy answers, in batches.

Shapes: B batch, T prompt tokens, A answer tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig

from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs

X = TypeVar("X")


@contextmanager
def neutral_generation(model: Any) -> Iterator[None]:
    """Hide a model's generation defaults: they would fill what `generate` was not told.

    A repetition penalty or a banned token would give answers that plain greedy decoding, which
    the draft is made for, does not give.
    """
    defaults = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = defaults


@torch.inference_mode()
def generate_answers(
    target: HuggingFaceTarget, prompts: Sequence[TargetInputs], max_new_tokens: int
) -> list[Tensor]:
    """Answer prompts greedily in one batch.

    Returns:
        For each prompt [A] int64, its end token included where one was generated.
    """
    batch, _ = target.collate(prompts)
    ends = list(target.spec.eos_token_ids)
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    with neutral_generation(target.model):
        output_BS = target.model.generate(**batch, generation_config=config)
    longest = batch["input_ids"].shape[1]
    return [cut_at_end(row_S[longest:], ends) for row_S in output_BS]


def cut_at_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """Tokens up to the first end token, that one included."""
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype, device=tokens.device))
    places = is_end.nonzero()
    return tokens[: int(places[0, 0]) + 1] if len(places) else tokens


def split_batches(items: Sequence[X], lengths: Sequence[int], batch_tokens: int) -> list[list[X]]:
    """Split items, in order, into batches of at most `batch_tokens` tokens with padding.

    Args:
        items: Anything.
        lengths: Tokens of each item.
        batch_tokens: Budget; an item above it makes a batch of its own.
    """
    batches: list[list[X]] = []
    longest = 0
    for item, length in zip(items, lengths, strict=True):
        longest = max(longest, length)
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = length
        batches[-1].append(item)
    return batches
