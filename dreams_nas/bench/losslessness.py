"""Every arm's answer against plain decoding: equal, or a proven near-tie of the target's logits.

Shapes: T tokens of the common prefix, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dreams_nas.bench.arms import PLAIN_NAME
from dreams_nas.bench.measure import BenchResult
from dreams_nas.core.config import Config
from dreams_nas.core.errors import RunError
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import Target, TargetInputs

BuildReference = Callable[[Target], Target]
"""Builds a float64 copy of a target."""

_ABSOLUTE_TOLERANCE = {torch.float64: 0.0, torch.float32: 1e-4}
"""Largest gap of two logits that counts as a tie."""
_RELATIVE_TOLERANCE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""The same as a share of the largest absolute logit; float16 has three more bits than bfloat16."""


class Divergence(Config):
    """The first difference between an arm's answer and the plain one."""

    prompt_id: str
    """Which prompt."""
    arm: str
    """Which arm."""
    pass_index: int
    """In which pass."""
    position: int
    """Which token of the answer, from 0."""
    plain_token: int | None
    """What plain decoding wrote; null where its answer had ended."""
    arm_token: int | None
    """What the arm wrote; null where its answer had ended."""
    gap: float | None
    """Distance of the two tokens' logits in float64; null when one answer simply ends."""
    tolerance: float | None
    """Largest gap that counts as a tie; null when one answer simply ends."""
    is_explained: bool
    """Whether the target's own logits are tied there."""


class Losslessness(Config):
    """Outcome over all prompts, arms and passes."""

    mismatched_tokens: int
    """First differences that are not explained."""
    explained_near_ties: int
    """First differences that are near-ties of the target's logits."""
    num_tokens_checked: int
    """Positions compared; comparing a prompt ends at its first difference."""
    divergences: tuple[Divergence, ...]
    """Every first difference."""


def build_float64(target: Target) -> Target:
    """A copy of a target that computes in float64."""
    assert isinstance(target, HuggingFaceTarget), "only models of transformers can be copied"
    model = copy.deepcopy(target.model).to(torch.float64)
    return type(target)(model, target.processor, target.tokenizer, target.spec.name)


def tie_tolerance(dtype: torch.dtype, logits_V: Tensor) -> float:
    """Largest gap of two logits that counts as a tie for a target of this precision."""
    if dtype in _ABSOLUTE_TOLERANCE:
        return _ABSOLUTE_TOLERANCE[dtype]
    return _RELATIVE_TOLERANCE[dtype] * float(logits_V.abs().max())


@torch.inference_mode()
def exact_logits(reference: Target, inputs: TargetInputs, prefix: Sequence[int]) -> Tensor:
    """Logits of the token that follows the prompt and an answer's first tokens, [V]."""
    moved: dict[str, Any] = {
        key: value.to(reference.dtype)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for key, value in inputs.model_inputs.items()
    }
    num_tokens = len(prefix)
    cache = reference.build_cache(len(inputs.input_ids_T) + num_tokens)
    logits_V = reference.prefill(replace(inputs, model_inputs=moved), cache).logits_V
    if not num_tokens:
        return logits_V
    depths_T = torch.arange(num_tokens, device=reference.device)
    mask_TT = torch.zeros(num_tokens, num_tokens, dtype=reference.dtype, device=reference.device)
    mask_TT.masked_fill_(depths_T[:, None] < depths_T, torch.finfo(reference.dtype).min)
    tokens_T = torch.tensor(list(prefix), device=reference.device)
    mask = mask_TT if num_tokens > 1 else None
    return reference.verify(tokens_T, depths_T, mask, cache).logits_QV[-1]


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter answer included."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


class Judge:
    """Explains differences; builds the float64 copy at the first one that needs it."""

    def __init__(self, target: Target, build_reference: BuildReference) -> None:
        self._target, self._build = target, build_reference
        self._reference: Target | None = None

    def gap(
        self, inputs: TargetInputs, prefix: Sequence[int], plain: int, other: int
    ) -> tuple[float, float, bool]:
        """Gap, tolerance, and whether it is a tie of the best logits."""
        if self._reference is None:
            self._reference = self._build(self._target)
        logits_V = exact_logits(self._reference, inputs, prefix)
        tolerance = tie_tolerance(self._target.dtype, logits_V)
        gap = abs(float(logits_V[plain] - logits_V[other]))
        # Two equal logits far below the best one would excuse an engine that picks neither.
        behind = float(logits_V.max() - logits_V[plain])
        return gap, tolerance, gap <= tolerance and behind <= tolerance


def check_losslessness(
    target: Target, result: BenchResult, build_reference: BuildReference = build_float64
) -> Losslessness:
    """Compare every answer of every arm and pass with plain decoding's first one.

    The plain arm's own later passes are compared, too, and equal answers of one arm counted once.

    Args:
        target: The target that decoded.
        result: The bench.
        build_reference: Builds the float64 copy; called at most once, and only at a difference.
    """
    judge = Judge(target, build_reference)
    num_checked = 0
    found: list[Divergence] = []
    for arm in result.arms:
        if arm.reference is not None:
            continue  # it is ours that is promised to be lossless
        for index, prompt in enumerate(result.prompts):
            plain = result.first(PLAIN_NAME, index).tokens
            seen = {plain} if arm.name == PLAIN_NAME else set()
            for sample in result.by_place[arm.name, index]:
                if sample.tokens in seen:
                    continue
                seen.add(sample.tokens)
                place = first_difference(plain, sample.tokens)
                if place is None:
                    num_checked += len(plain)
                    continue
                num_checked += place + 1
                tokens = [
                    answer[place] if place < len(answer) else None
                    for answer in (plain, sample.tokens)
                ]
                gap, tolerance, explained = None, None, False
                if tokens[0] is not None and tokens[1] is not None:
                    prefix = plain[:place]
                    gap, tolerance, explained = judge.gap(
                        prompt.inputs, prefix, tokens[0], tokens[1]
                    )
                found.append(
                    Divergence(
                        prompt_id=prompt.id,
                        arm=arm.name,
                        pass_index=sample.pass_index,
                        position=place,
                        plain_token=tokens[0],
                        arm_token=tokens[1],
                        gap=gap,
                        tolerance=tolerance,
                        is_explained=explained,
                    )
                )
    return Losslessness(
        mismatched_tokens=sum(not d.is_explained for d in found),
        explained_near_ties=sum(d.is_explained for d in found),
        num_tokens_checked=num_checked,
        divergences=tuple(found),
    )


def require_lossless(mismatched_tokens: int) -> None:
    """Fail a run whose answers differ from plain decoding.

    Raises:
        RunError: There are unexplained first differences.
    """
    if mismatched_tokens:
        raise RunError(
            f"{mismatched_tokens} answers differ from plain decoding where the target's logits are "
            "not tied: decoding is not lossless here"
        )
