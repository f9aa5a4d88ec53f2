"""The bench's clock and its arithmetic, on decodings that took a programmed time."""

from typing import Any

import numpy as np
import pytest
from bench_cases import Program, build_arms, build_prompts, programmed
from draft_models import build_loud_target

from dreams_nas.bench.arms import PLAIN, Arm, parse_drafts, require_arms
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.measure import BenchResult, arm_order, run_bench
from dreams_nas.bench.statistics import arm_statistics, paired_ratios, quantiles
from dreams_nas.core.errors import UserError
from dreams_nas.decode.accept import clip_accepted
from dreams_nas.decode.engine import DecodeResult
from dreams_nas.targets.huggingface import HuggingFaceTarget

NUM_PROMPTS = 5
# Tokens of the answer to each prompt; the last one ends with the prefill's token.
LENGTHS = (21, 41, 11, 31, 1)
PASS_FACTOR = (9.0, 1.0, 1.02)
"""The first pass is disturbed: medians must not see it."""
PER_TOKEN_MS = {"plain": (6.0, 6.0, 5.0, 8.0), "winner": (3.0, 2.0, 4.0, 2.0)}
PER_TOKEN_MS["eagle3"] = tuple(1.5 * ms for ms in PER_TOKEN_MS["winner"])


def fake_decode(arm: str, prompt: int, repeat: int) -> DecodeResult:
    length = LENGTHS[prompt]
    if length == 1:
        return programmed([1], [], prefill_s=0.01, decode_s=0.0)
    # The winner accepts 3 of 4 levels, the last round is cut by the end of the answer.
    step = {"plain": 1, "winner": 4, "eagle3": 2}[arm]
    num_rounds = -(-(length - 1) // step)
    seconds = 1e-3 * PER_TOKEN_MS[arm][prompt] * (length - 1) * PASS_FACTOR[repeat]
    return programmed(
        range(length), [step - 1] * num_rounds, prefill_s=0.02 * (repeat + 1), decode_s=seconds
    )


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return build_loud_target("llama")


def run(target: HuggingFaceTarget, num_warmup: int = 0, **changes: Any) -> tuple[Any, BenchResult]:
    prompts = build_prompts(target, NUM_PROMPTS)
    program = Program(prompts, changes.pop("decode", fake_decode))
    config = MeasureConfig(max_new_tokens=64, num_passes=3, num_warmup=num_warmup)
    result = run_bench(
        target,
        changes.pop("arms", None) or build_arms(target),
        prompts,
        config,
        decode_one=program,
        measure_load=lambda: 0.5,
        quiet=True,
    )
    return program, result


def test_arms_take_turns_prompt_by_prompt_and_each_comes_first_equally_often(
    target: HuggingFaceTarget,
) -> None:
    program, result = run(target)
    calls = [program.calls[i : i + 3] for i in range(0, len(program.calls), 3)]
    assert [{p for _, p in turn} for turn in calls] == [{i % 5} for i in range(15)]
    firsts = [turn[0][0] for turn in calls]
    assert {name: firsts.count(name) for name in set(firsts)} == {
        "plain": 5,
        "winner": 5,
        "eagle3": 5,
    }
    assert arm_order(3, 0, 1) == [1, 2, 0]
    assert [(s.arm, s.prompt) for s in result.samples] == program.calls
    assert [s.position for s in result.samples[:3]] == [0, 1, 2]
    assert result.load_cores == (0.5, 0.5)


def test_warm_up_is_decoded_by_every_arm_and_not_counted(target: HuggingFaceTarget) -> None:
    def decode(arm: str, prompt: int, repeat: int) -> DecodeResult:
        if prompt < 2 and repeat == 0:
            return programmed([1, 2], [0], prefill_s=99.0, decode_s=99.0)
        return fake_decode(arm, prompt, max(0, repeat - (prompt < 2)))

    program, result = run(target, num_warmup=2, decode=decode)
    assert len(program.calls) == len(result.samples) + 2 * 3
    assert max(sample.decode_s for sample in result.samples) < 99
    cold = arm_statistics(run(target)[1], "winner")
    assert arm_statistics(result, "winner") == cold


def test_speedup_is_the_median_over_prompts_of_paired_medians_over_passes(
    target: HuggingFaceTarget,
) -> None:
    _, result = run(target)
    statistics = arm_statistics(result, "winner")
    ratios = [2.0, 3.0, 1.25, 4.0]  # the prompt of one token has nothing to divide
    assert statistics.speedup is not None
    assert statistics.speedup.median == pytest.approx(2.5)
    assert statistics.speedup.p10 == pytest.approx(np.percentile(ratios, 10))
    assert statistics.speedup.p90 == pytest.approx(np.percentile(ratios, 90))
    plain_s = 20 * 6 + 40 * 6 + 10 * 5 + 30 * 8
    own_s = 20 * 3 + 40 * 2 + 10 * 4 + 30 * 2
    assert statistics.ratio_of_sums == pytest.approx(plain_s / own_s)
    assert statistics.tokens_per_s == pytest.approx(1e3 * 100 / own_s / 1.02)
    assert arm_statistics(result, "plain").speedup == quantiles([1.0])


def test_winner_over_eagle3_is_above_one_when_the_winner_is_faster(
    target: HuggingFaceTarget,
) -> None:
    _, result = run(target)
    assert paired_ratios(result, "eagle3", "winner") == pytest.approx([1.5] * 4)


def test_acceptance_is_sum_over_sum_and_levels_are_shares_of_rounds(
    target: HuggingFaceTarget,
) -> None:
    _, result = run(target)
    winner = arm_statistics(result, "winner")
    # 20, 40, 10 and 30 tokens in 5, 10, 3 and 8 rounds of 4, the third and fourth ones cut short.
    assert winner.acceptance_length == pytest.approx(100 / 26)
    # 26 rounds; the cut ones accept 2 of 3 (2 tokens are left, both accepted).
    assert winner.acceptance_by_level == pytest.approx((1.0, 1.0, 24 / 26, 0.0))
    assert winner.acceptance_rate == pytest.approx((24 * 3 + 2 * 2) / (26 * 4))
    plain = arm_statistics(result, "plain")
    assert (plain.acceptance_length, plain.acceptance_rate) == (None, None)
    assert plain.acceptance_by_level == ()


def test_accepted_tokens_beyond_the_end_of_the_answer_do_not_count() -> None:
    assert clip_accepted([2, 3, 4], 12) == (2, 3, 4)
    assert clip_accepted([2, 3, 4], 11) == (2, 3, 3)
    assert clip_accepted([2, 3, 4], 9) == (2, 3, 1)
    assert clip_accepted([], 1) == ()


def test_end_to_end_counts_the_prefill_by_length_of_the_answer(target: HuggingFaceTarget) -> None:
    _, result = run(target)
    groups = arm_statistics(result, "winner").end_to_end
    assert sum(group.num_prompts for group in groups) == NUM_PROMPTS
    assert [group.min_tokens for group in groups] == sorted(g.min_tokens for g in groups)
    assert [(g.min_tokens, g.max_tokens) for g in groups] == [(1, 11), (21, 21), (31, 41)]

    def total(arm: str, prompt: int) -> float:
        seconds = 1e-3 * PER_TOKEN_MS[arm][prompt] * (LENGTHS[prompt] - 1)
        passes = [0.02 * (i + 1) + seconds * factor for i, factor in enumerate(PASS_FACTOR)]
        return float(np.median(passes))

    for group, prompts in zip(groups[1:], ([0], [1, 3]), strict=True):
        ratios = [total("plain", p) / total("winner", p) for p in prompts]
        assert group.speedup == pytest.approx(float(np.median(ratios)))
    assert groups[0].speedup < 1.3  # nearly all prefill


def test_answers_of_one_token_alone_give_null_not_a_crash(target: HuggingFaceTarget) -> None:
    def decode(arm: str, prompt: int, repeat: int) -> DecodeResult:
        return programmed([1], [], prefill_s=0.01, decode_s=0.0)

    _, result = run(target, decode=decode)
    statistics = arm_statistics(result, "winner")
    assert statistics.speedup is None
    assert statistics.ratio_of_sums is None
    assert statistics.tokens_per_s is None
    assert statistics.acceptance_length is None


def test_arms_that_cannot_be_compared_are_refused(target: HuggingFaceTarget) -> None:
    with pytest.raises(UserError, match="winner occur twice"):
        require_arms([PLAIN, Arm("winner"), Arm("winner")])
    with pytest.raises(UserError, match="one must be 'plain'"):
        require_arms([Arm("winner")])
    with pytest.raises(UserError, match="no prompts"):
        run_bench(target, [PLAIN], [], MeasureConfig(), quiet=True)


def test_drafts_of_the_command_line_get_names() -> None:
    assert parse_drafts(["runs/a/draft", "eagle3=runs/b", "runs/c"]) == {
        "winner": "runs/a/draft",
        "eagle3": "runs/b",
        "c": "runs/c",
    }
    for wrong in (["plain=x"], ["a=x", "a=y"], ["=x"]):
        with pytest.raises(UserError, match="taken or empty"):
            parse_drafts(wrong)
