"""Answers against plain decoding: a planted off-by-one is caught, a near-tie is told from it."""

from dataclasses import replace

import pytest
import torch
from bench_cases import build_arms, build_prompts
from draft_models import LOUD_TOKENS, build_loud_target

from dreams_nas.bench.arms import ReadyArm, decode_arm
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.losslessness import (
    Losslessness,
    build_float64,
    check_losslessness,
    exact_logits,
    first_difference,
    tie_tolerance,
)
from dreams_nas.bench.measure import DecodeOne, run_bench
from dreams_nas.decode.engine import DecodeResult, decode
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import Target, TargetInputs

CONFIG = MeasureConfig(max_new_tokens=14, num_passes=2, num_warmup=0)


def check(
    target: HuggingFaceTarget, decode_one: DecodeOne, num_prompts: int = 2
) -> tuple[Losslessness, int]:
    """The verdict, and how many float64 copies it took."""
    prompts = build_prompts(target, num_prompts)
    result = run_bench(
        target,
        build_arms(target),
        prompts,
        CONFIG,
        decode_one=decode_one,
        measure_load=lambda: 0.0,
        quiet=True,
    )
    built: list[Target] = []

    def build(original: Target) -> Target:
        built.append(build_float64(original))
        return built[-1]

    return check_losslessness(target, result, build), len(built)


def spoilt(spoil_token: int, place: int) -> DecodeOne:
    """Plain decoding for every arm, but for one token of the winner's."""

    def decode_one(
        target: Target, ready: ReadyArm, inputs: TargetInputs, max_new_tokens: int
    ) -> DecodeResult:
        result = decode(target, inputs, max_new_tokens=max_new_tokens)
        if ready.arm.name != "winner":
            return result
        tokens = list(result.tokens)
        tokens[place] = spoil_token
        return replace(result, tokens=tokens)

    return decode_one


def test_equal_answers_need_no_float64_copy() -> None:
    target = build_loud_target("llava")
    found, num_built = check(target, decode_arm)
    lengths = [
        len(decode(target, p.inputs, max_new_tokens=14).tokens) for p in build_prompts(target, 2)
    ]
    assert found.mismatched_tokens == found.explained_near_ties == num_built == 0
    # Two arms besides the plain one; equal answers of two passes count once.
    assert found.num_tokens_checked == 2 * sum(lengths)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_planted_off_by_one_is_caught(dtype: torch.dtype) -> None:
    target = build_loud_target("llava", dtype=dtype)

    def decode_one(
        target: Target, ready: ReadyArm, inputs: TargetInputs, max_new_tokens: int
    ) -> DecodeResult:
        result = decode_arm(target, ready, inputs, max_new_tokens)
        if ready.arm.name != "eagle3":
            return result
        shifted = result.tokens[:5] + result.tokens[6:] + result.tokens[-1:]
        return replace(result, tokens=shifted)

    found, num_built = check(target, decode_one)
    different = [d for d in found.divergences if d.arm == "eagle3"]
    assert different
    assert found.mismatched_tokens == len(different)
    assert found.explained_near_ties == 0
    assert num_built == 1, "the copy is built once for all prompts"
    assert all(d.position >= 5 and d.gap is not None and d.gap > 1e-4 for d in different)


def test_a_divergence_between_tied_logits_is_explained() -> None:
    """Token 80 has the logits of token 5 but for a hair; an arm may write it there."""
    target = build_loud_target("llava", dtype=torch.float32)
    weight = target.model.get_output_embeddings().weight
    weight.data[80] = weight.data[5] * (1 + 1e-7)
    prompts = build_prompts(target, 3)
    answers = [decode(target, p.inputs, max_new_tokens=14).tokens for p in prompts]
    token = next(t for t in (5, 80) if t in answers[0])
    place = answers[0].index(token)
    found, _ = check(target, spoilt(85 - token, place), num_prompts=1)
    assert found.explained_near_ties == 1
    assert found.mismatched_tokens == 0
    assert found.divergences[0].position == place
    assert found.divergences[0].tolerance == 1e-4
    # Comparing the prompt ends there: the winner's part is shorter than the baseline's.
    assert found.num_tokens_checked == place + 1 + len(answers[0])
    loud = next(t for t in LOUD_TOKENS if t != 5)
    other, _ = check(target, spoilt(loud, place), num_prompts=1)
    assert other.mismatched_tokens == 1
    assert other.explained_near_ties == 0


def test_two_equal_logits_far_below_the_best_excuse_nothing() -> None:
    """If plain decoding itself did not pick the best token, no tie explains the difference."""
    target = build_loud_target("llava", dtype=torch.float32)
    weight = target.model.get_output_embeddings().weight
    weight.data[80] = weight.data[81]

    def decode_one(
        target: Target, ready: ReadyArm, inputs: TargetInputs, max_new_tokens: int
    ) -> DecodeResult:
        result = decode_arm(target, ready, inputs, max_new_tokens)
        wrong = 80 if ready.arm.name == "plain" else 81
        return replace(result, tokens=[*result.tokens[:4], wrong])

    found, _ = check(target, decode_one, num_prompts=1)
    assert [d.gap for d in found.divergences] == pytest.approx([0.0, 0.0])
    assert found.mismatched_tokens == 2


def test_an_answer_that_ends_too_early_is_a_mismatch() -> None:
    target = build_loud_target("llava", dtype=torch.float32)

    def decode_one(
        target: Target, ready: ReadyArm, inputs: TargetInputs, max_new_tokens: int
    ) -> DecodeResult:
        result = decode_arm(target, ready, inputs, max_new_tokens)
        short = ready.arm.name == "winner"
        return replace(result, tokens=result.tokens[:-1] if short else result.tokens)

    found, num_built = check(target, decode_one, num_prompts=1)
    assert found.mismatched_tokens == 1
    assert found.divergences[0].arm_token is None
    assert num_built == 0


def test_a_later_pass_that_differs_is_seen() -> None:
    target = build_loud_target("llava", dtype=torch.float32)
    seen: list[str] = []

    def decode_one(
        target: Target, ready: ReadyArm, inputs: TargetInputs, max_new_tokens: int
    ) -> DecodeResult:
        result = decode_arm(target, ready, inputs, max_new_tokens)
        seen.append(ready.arm.name)
        if ready.arm.name == "plain" and seen.count("plain") == 2:
            return replace(result, tokens=[*result.tokens[:3], 96, *result.tokens[4:]])
        return result

    found, _ = check(target, decode_one, num_prompts=1)
    assert [(d.arm, d.pass_index) for d in found.divergences] == [("plain", 1)]
    assert found.mismatched_tokens == 1


@pytest.mark.parametrize(
    ("family", "prompt"), [("llava", 0), ("llava", 2), ("qwen2_5_vl", 1), ("gemma3", 1)]
)
def test_recomputed_logits_are_those_of_decoding(family: str, prompt: int) -> None:
    target = build_loud_target(family, dtype=torch.float32, seed=1)
    inputs = build_prompts(target, 3)[prompt].inputs
    answer = decode(target, inputs, max_new_tokens=12, stop_ids=()).tokens
    reference = build_float64(target)
    assert reference.dtype == torch.float64
    assert target.dtype == torch.float32
    for place in (0, 1, 2, 9):
        logits_V = exact_logits(reference, inputs, answer[:place])
        assert logits_V.dtype == torch.float64
        assert int(logits_V.argmax()) == answer[place]


def test_tolerances_are_those_of_the_design() -> None:
    logits_V = torch.tensor([-8.0, 3.0])
    assert tie_tolerance(torch.float64, logits_V) == 0
    assert tie_tolerance(torch.float32, logits_V) == 1e-4
    assert tie_tolerance(torch.bfloat16, logits_V) == 0.25


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0
