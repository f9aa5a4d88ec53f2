"""The whole bench: time all arms, prove them lossless, replay the winner, price it, sum up."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dreams_nas.bench.arms import (
    BASELINE_NAME,
    PLAIN_NAME,
    WINNER_NAME,
    Arm,
    decode_arm,
    policy_arm_name,
    ready_arm,
)
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.lockstep import LockstepReport, check_lockstep
from dreams_nas.bench.losslessness import (
    BuildReference,
    Losslessness,
    build_float64,
    check_losslessness,
)
from dreams_nas.bench.measure import BenchResult, DecodeOne, Prompt, run_bench
from dreams_nas.bench.overhead import verify_over_forward
from dreams_nas.bench.predicted import predict_arms
from dreams_nas.bench.references import GENERATE_NAME
from dreams_nas.bench.statistics import (
    ArmStatistics,
    Quantiles,
    arm_statistics,
    paired_ratios,
    quantiles,
)
from dreams_nas.core.console import warn
from dreams_nas.core.device import Deployment
from dreams_nas.core.errors import UserError
from dreams_nas.core.lock import machine_lock
from dreams_nas.decode.parts import Parts, shares
from dreams_nas.decode.plan import TreePlan
from dreams_nas.features.conversations import Conversation
from dreams_nas.latency.table import LatencyTable
from dreams_nas.targets.deployment import target_deployment
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import Target, TargetSpec

_NUM_WATCHED = 20
"""Prompts whose rounds are taken apart: a few hundred rounds are enough for shares."""


@dataclass(frozen=True)
class BenchReport:
    """Everything a bench found."""

    result: BenchResult
    """The samples."""
    statistics: dict[str, ArmStatistics]
    """Measured numbers of each arm."""
    predicted: dict[str, Quantiles | None]
    """Predicted speedup of arms that were priced."""
    losslessness: Losslessness
    lockstep: LockstepReport | None
    """Of the winner; None when nothing was drafted."""
    winner_over_eagle3: Quantiles | None
    """Paired time ratios eagle3 / winner over prompts: above 1 the winner is faster. None unless
    both are arms and draft."""
    plain_over_generate: Quantiles | None
    """Paired time ratios of transformers' `generate` / plain decoding here: above 1 ours is faster.
    None unless it is an arm."""
    verify_over_forward: Quantiles | None
    """Time of the winner's verification / decoder and head called bare; None without a tree."""
    adaptive_over_best_fixed: Quantiles | None
    """Paired time ratios of the winner's fastest other policy / adaptive: above 1 adaptive is
    faster. None without that arm."""
    shares: dict[str, dict[str, float]]
    """Of each arm that drafts: what its rounds spend their time on, see `decode.parts`."""
    target: TargetSpec
    """Whose answers these are."""
    deployment: Deployment
    """Where it ran."""
    seconds_by_stage: dict[str, float]
    """Seconds of warm-up, measuring, the losslessness check and the replay."""

    @property
    def calibration_error(self) -> float | None:
        """Of the winner's path probabilities; None where it was not calibrated."""
        winner = self.winner
        calibration = (
            None if winner is None or winner.draft is None else winner.draft.config.calibration
        )
        return None if calibration is None else calibration.error

    @property
    def winner(self) -> Arm | None:
        """The winner's arm; None when the answer is not to speculate."""
        arm = self.result.arm(WINNER_NAME)
        return arm if arm is not None and arm.is_speculative else None


def build_prompts(target: Target, conversations: Sequence[Conversation]) -> list[Prompt]:
    """Conversations as the target reads them.

    Raises:
        UserError: A damaged image, or a prompt that does not fit; names the sample.
    """
    prompts = []
    for conversation in conversations:
        images = conversation.load_images()
        try:
            inputs = target.prepare(conversation.messages, images)
        except UserError as error:
            raise UserError(f"{conversation}: {error}") from error
        prompts.append(Prompt(conversation.id, inputs))
    return prompts


def require_room(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse prompts that leave no room for the answer, before anything is timed.

    Raises:
        UserError: Names the longest prompt.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.inputs.input_ids_T), default=None)
    if longest is None:
        return
    length, limit = len(longest.inputs.input_ids_T), target.spec.max_positions
    if length + max_new_tokens > limit:
        raise UserError(
            f"sample '{longest.id}' has {length} tokens; with max_new_tokens {max_new_tokens} it "
            f"needs {length + max_new_tokens} positions, and the target has {limit}: allow at most "
            f"{max(0, limit - length)} new tokens, or leave the sample out"
        )


def bench_arms(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    config: MeasureConfig,
    *,
    table: LatencyTable | None = None,
    predicted: Mapping[str, Quantiles] | None = None,
    deployment: Deployment | None = None,
    decode_one: DecodeOne = decode_arm,
    build_reference: BuildReference = build_float64,
    quiet: bool = False,
) -> BenchReport:
    """Run a whole bench.

    Args:
        target: The target of every arm.
        arms: `plain`; `winner` unless the answer is not to speculate; `eagle3` to compare with.
        prompts: Prompts of the *test* split.
        config: Passes, warm-up and the token limit.
        table: Prices the rounds of arms that `predicted` lacks; the caller has checked that it is
            this deployment's.
        predicted: Speedups that were predicted before, by arm: what a search or the replay after
            fine-tuning said. They win over the table.
        deployment: Where this runs; found out by default.
        decode_one: Decodes and times one prompt; injected in tests.
        build_reference: Builds a float64 copy of the target; injected in tests.
        quiet: No progress.

    Raises:
        UserError: No prompts, no room for the answers, arms that cannot be compared, or a draft of
            another target.
    """
    require_room(target, prompts, config.max_new_tokens)
    deployment = deployment or target_deployment(target)
    result = run_bench(target, arms, prompts, config, decode_one=decode_one, quiet=quiet)
    seconds = {"warmup": result.warmup_s, "measure": result.measure_s}
    start = time.perf_counter()
    losslessness = check_losslessness(target, result, build_reference)
    seconds["losslessness"] = time.perf_counter() - start
    start = time.perf_counter()
    winner = result.arm(WINNER_NAME)
    lockstep = None
    if winner is not None and winner.is_speculative:
        lockstep = check_lockstep(target, winner, prompts, config.max_new_tokens, quiet)
        if lockstep.num_rounds_differing:
            warn(
                f"{lockstep.num_rounds_differing} of {lockstep.num_rounds} rounds differ between "
                "decoding and its lockstep replay; on one device they should be equal"
            )
    seconds["replay"] = time.perf_counter() - start
    start = time.perf_counter()
    drafting = [arm for arm in arms if arm.is_speculative]
    with machine_lock("bench", quiet=quiet):
        shares_by_arm = {a.name: measure_shares(target, a, prompts, config) for a in drafting}
        overhead = _verify_over_forward(target, winner, prompts)
    seconds["shares"] = time.perf_counter() - start
    known: dict[str, Quantiles | None] = dict(predicted or {})
    if table is not None:
        open_names = [
            a.name for a in arms if a.is_speculative and a.grown is None and a.name not in known
        ]
        known |= predict_arms(result, table, open_names)
    return BenchReport(
        result=result,
        statistics={arm.name: arm_statistics(result, arm.name) for arm in arms},
        predicted=known,
        losslessness=losslessness,
        lockstep=lockstep,
        winner_over_eagle3=_winner_over_baseline(result),
        plain_over_generate=_plain_over_generate(result),
        verify_over_forward=overhead,
        adaptive_over_best_fixed=_adaptive_over_best_fixed(result),
        shares=shares_by_arm,
        target=target.spec,
        deployment=deployment,
        seconds_by_stage=seconds,
    )


def _winner_over_baseline(result: BenchResult) -> Quantiles | None:
    both = [result.arm(name) for name in (WINNER_NAME, BASELINE_NAME)]
    if any(arm is None or not arm.is_speculative for arm in both):
        return None
    return quantiles(paired_ratios(result, BASELINE_NAME, WINNER_NAME))


def _plain_over_generate(result: BenchResult) -> Quantiles | None:
    if result.arm(GENERATE_NAME) is None:
        return None
    return quantiles(paired_ratios(result, GENERATE_NAME, PLAIN_NAME))


def _verify_over_forward(
    target: Target, winner: Arm | None, prompts: Sequence[Prompt]
) -> Quantiles | None:
    if winner is None or not isinstance(target, HuggingFaceTarget):
        return None
    ready = ready_arm(winner, target)
    if ready.draft is None or not isinstance(ready.plan, TreePlan):
        return None
    return verify_over_forward(target, ready.plan, ready.draft.target_layer_ids, prompts[0].inputs)


def _adaptive_over_best_fixed(result: BenchResult) -> Quantiles | None:
    adaptive = result.arm(policy_arm_name("adaptive"))
    winner = result.arm(WINNER_NAME)
    if adaptive is None or winner is None:
        return None
    fixed = [a.name for a in result.arms if a.draft is winner.draft and a is not adaptive]
    total_s = {name: sum(s.decode_s for s in result.samples if s.arm == name) for name in fixed}
    return quantiles(paired_ratios(result, min(fixed, key=total_s.__getitem__), adaptive.name))


def measure_shares(
    target: Target, arm: Arm, prompts: Sequence[Prompt], config: MeasureConfig
) -> dict[str, float]:
    """Decode some prompts once more, watched, and say what the rounds spend their time on."""
    ready, parts = ready_arm(arm, target), Parts(target.device)
    total_s = 0.0
    for prompt in prompts[:_NUM_WATCHED]:
        done = decode_arm(target, ready, prompt.inputs, config.max_new_tokens, parts=parts)
        total_s += done.decode_s
    return shares(parts.seconds, total_s) if total_s else {}
