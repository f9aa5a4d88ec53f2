"""The clock of a bench: all arms in one process, on one target, interleaved prompt by prompt."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dreams_nas.bench.arms import Arm, ReadyArm, decode_arm, ready_arm, require_arms
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.core.console import progress
from dreams_nas.core.errors import UserError
from dreams_nas.core.lock import machine_lock, warn_if_loaded
from dreams_nas.decode.accept import clip_accepted
from dreams_nas.decode.engine import DecodeResult
from dreams_nas.targets.protocol import Target, TargetInputs

DecodeOne = Callable[[Target, ReadyArm, TargetInputs, int], DecodeResult]
"""Decodes one prompt as one arm does; injected in tests."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a bench."""

    id: str
    """Id of its conversation."""
    inputs: TargetInputs
    """What the target reads."""


@dataclass(frozen=True)
class Sample:
    """One timed decoding."""

    prompt: int
    """Index of the prompt."""
    arm: str
    """Name of the arm."""
    pass_index: int
    """Which pass, from 0."""
    position: int
    """Which turn the arm had on this prompt in this pass, from 0."""
    prefill_s: float
    """Seconds of the target's prefill."""
    decode_s: float
    """Seconds after it: draft prefill and all rounds."""
    tokens: tuple[int, ...]
    """The answer."""
    accepted: tuple[int, ...]
    """Drafted tokens accepted in each round, what lies beyond the answer's end not counted."""

    @property
    def num_decoded(self) -> int:
        """Tokens after the first one, which the prefill yields."""
        return max(0, len(self.tokens) - 1)

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding seconds per token after the first; None without any."""
        return self.decode_s / self.num_decoded if self.num_decoded else None


@dataclass(frozen=True)
class BenchResult:
    """All that was timed."""

    arms: tuple[Arm, ...]
    prompts: tuple[Prompt, ...]
    config: MeasureConfig
    samples: tuple[Sample, ...]
    """In the order of time."""
    load_cores: tuple[float, float]
    """Cores that other processes kept busy, before and after."""
    warmup_s: float
    """Seconds of the warm-up."""
    measure_s: float
    """Seconds of all passes."""

    @cached_property
    def by_place(self) -> dict[tuple[str, int], list[Sample]]:
        """Samples of each (arm, prompt), in the order of the passes."""
        found: dict[tuple[str, int], list[Sample]] = {}
        for sample in self.samples:
            found.setdefault((sample.arm, sample.prompt), []).append(sample)
        return found

    def first(self, arm: str, prompt: int) -> Sample:
        """What an arm did with a prompt in the first pass."""
        return self.by_place[arm, prompt][0]

    def arm(self, name: str) -> Arm | None:
        """The arm of that name, if there is one."""
        return next((arm for arm in self.arms if arm.name == name), None)


def arm_order(num_arms: int, pass_index: int, prompt: int) -> list[int]:
    """Arms in the order of their turns: rotated, so that each comes first equally often."""
    start = (pass_index + prompt) % num_arms
    return [(start + turn) % num_arms for turn in range(num_arms)]


def _sample(result: DecodeResult, prompt: int, arm: str, pass_index: int, position: int) -> Sample:
    return Sample(
        prompt=prompt,
        arm=arm,
        pass_index=pass_index,
        position=position,
        prefill_s=result.prefill_s,
        decode_s=result.decode_s,
        tokens=tuple(result.tokens),
        accepted=clip_accepted([r.num_accepted for r in result.rounds], len(result.tokens)),
    )


def run_bench(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    config: MeasureConfig,
    *,
    decode_one: DecodeOne = decode_arm,
    measure_load: Callable[[], float] = warn_if_loaded,
    quiet: bool = False,
) -> BenchResult:
    """Time all arms on all prompts, holding the machine lock.

    Args:
        target: The target of every arm.
        arms: With one named `plain`.
        prompts: What to decode.
        config: Passes, warm-up and the token limit.
        decode_one: Decodes and times one prompt; injected in tests.
        measure_load: Load of other processes in cores; injected in tests.
        quiet: No progress.

    Raises:
        UserError: No prompts, arms that cannot be compared, or a draft of another target.
    """
    require_arms(arms)
    if not prompts:
        raise UserError("there are no prompts to decode; give --data with at least one")
    ready = [ready_arm(arm, target) for arm in arms]
    samples: list[Sample] = []
    total = len(arms) * len(prompts) * config.num_passes
    with machine_lock("bench", quiet=quiet):
        load_before = measure_load()
        start = time.perf_counter()
        for prompt in prompts[: config.num_warmup]:
            for one in ready:
                decode_one(target, one, prompt.inputs, config.max_new_tokens)
        warmup_s = time.perf_counter() - start
        with progress("decoding all arms", total, quiet) as bar:
            for pass_index in range(config.num_passes):
                for index, prompt in enumerate(prompts):
                    order = arm_order(len(ready), pass_index, index)
                    for position, turn in enumerate(order):
                        one = ready[turn]
                        result = decode_one(target, one, prompt.inputs, config.max_new_tokens)
                        samples.append(_sample(result, index, one.arm.name, pass_index, position))
                        bar.advance()
        measure_s = time.perf_counter() - start - warmup_s
        load_after = measure_load()
    return BenchResult(
        arms=tuple(arms),
        prompts=tuple(prompts),
        config=config,
        samples=tuple(samples),
        load_cores=(load_before, load_after),
        warmup_s=warmup_s,
        measure_s=measure_s,
    )
