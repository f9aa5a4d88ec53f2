"""What the samples of a bench say: paired ratios per prompt, acceptance, end-to-end times.

Shapes: P prompts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dreams_nas.bench.arms import PLAIN_NAME
from dreams_nas.bench.measure import BenchResult, Sample
from dreams_nas.core.config import Config

FloatArray = npt.NDArray[np.float64]


class Quantiles(Config):
    """A ratio of times over prompts."""

    median: float
    """Median over prompts."""
    p10: float
    """Tenth percentile over prompts."""
    p90: float
    """Ninetieth percentile over prompts."""


class LengthGroup(Config):
    """End-to-end speedup of the prompts with answers of similar length."""

    min_tokens: int
    """Shortest answer of the group."""
    max_tokens: int
    """Longest answer of the group."""
    num_prompts: int
    """Prompts in the group."""
    speedup: float
    """Median over its prompts of plain seconds / this arm's, target prefill included."""


class ArmStatistics(Config):
    """One arm's numbers."""

    speedup: Quantiles | None
    """Plain seconds per token / this arm's, target prefill left out; null without a prompt that
    has more than one token."""
    ratio_of_sums: float | None
    """The same with the times of all prompts added up first."""
    tokens_per_s: float | None
    """Decoded tokens of all prompts / decoding seconds."""
    prefill_ms: float
    """Median over prompts of the target's prefill."""
    acceptance_length: float | None
    """tau: generated tokens (the prefill's left out) / verify rounds, sum over sum; null for an arm
    that drafts nothing, or without rounds."""
    acceptance_rate: float | None
    """Accepted tokens / levels of the tree, over all rounds; null where trees vary."""
    acceptance_by_level: tuple[float, ...]
    """Share of the rounds that accept level 1, 2, ...; empty for an arm that drafts nothing."""
    end_to_end: tuple[LengthGroup, ...]
    """Speedup with the target's prefill, by length of the answer."""


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Median, tenth and ninetieth percentile; None of nothing."""
    array = np.asarray(list(values), dtype=np.float64)
    if not array.size:
        return None
    p10, median, p90 = (float(value) for value in np.percentile(array, (10, 50, 90)))
    return Quantiles(median=median, p10=p10, p90=p90)


def _median_P(result: BenchResult, arm: str, value: Callable[[Sample], float | None]) -> FloatArray:
    """Median over passes for each prompt; NaN where there is nothing to measure."""
    medians = []
    for prompt in range(len(result.prompts)):
        values = [value(sample) for sample in result.by_place[arm, prompt]]
        known = [v for v in values if v is not None]
        medians.append(float(np.median(known)) if known else np.nan)
    return np.array(medians)


def _seconds_per_token(sample: Sample) -> float | None:
    return sample.seconds_per_token


def paired_ratios(result: BenchResult, slow: str, fast: str) -> FloatArray:
    """Seconds per token of `slow` / of `fast` for each prompt that both decode; above 1, `fast` is.

    Each is the median over passes.
    """
    ratio_P = _median_P(result, slow, _seconds_per_token) / _median_P(
        result, fast, _seconds_per_token
    )
    return ratio_P[np.isfinite(ratio_P)]


def _end_to_end(result: BenchResult, arm: str) -> tuple[LengthGroup, ...]:
    """Three groups of prompts with as equal numbers as ties allow, shortest answers first."""

    def total_s(sample: Sample) -> float:
        return sample.prefill_s + sample.decode_s

    ratio_P = _median_P(result, PLAIN_NAME, total_s) / _median_P(result, arm, total_s)
    length_P = np.array([len(result.first(arm, p).tokens) for p in range(len(ratio_P))])
    edges = np.unique(np.percentile(length_P, (0, 100 / 3, 200 / 3), method="higher"))
    group_P = np.searchsorted(edges, length_P, side="right") - 1
    groups = []
    for group in np.unique(group_P):
        inside = group_P == group
        groups.append(
            LengthGroup(
                min_tokens=int(length_P[inside].min()),
                max_tokens=int(length_P[inside].max()),
                num_prompts=int(inside.sum()),
                speedup=float(np.median(ratio_P[inside])),
            )
        )
    return tuple(groups)


def _acceptance(result: BenchResult, arm: str, num_levels: int, is_fixed: bool) -> dict[str, Any]:
    """Counted on the first pass: decoding is deterministic, the other passes repeat it."""
    samples = [result.first(arm, prompt) for prompt in range(len(result.prompts))]
    accepted = np.array([a for s in samples for a in s.accepted], dtype=np.int64)
    if not num_levels or not accepted.size:
        return {"acceptance_length": None, "acceptance_rate": None, "acceptance_by_level": ()}
    return {
        "acceptance_length": sum(s.num_decoded for s in samples) / accepted.size,
        "acceptance_rate": float(accepted.sum()) / (num_levels * accepted.size)
        if is_fixed
        else None,
        "acceptance_by_level": tuple(
            float((accepted >= level).mean()) for level in range(1, num_levels + 1)
        ),
    }


def arm_statistics(result: BenchResult, name: str) -> ArmStatistics:
    """Everything that is reported of one arm."""
    arm = result.arm(name)
    assert arm is not None, f"no arm '{name}'"
    plain_P = _median_P(result, PLAIN_NAME, _seconds_per_token)
    own_P = _median_P(result, name, _seconds_per_token)
    decoded_P = np.array([result.first(name, p).num_decoded for p in range(len(own_P))])
    known = np.isfinite(plain_P) & np.isfinite(own_P)
    own_s = float((own_P[known] * decoded_P[known]).sum())
    plain_s = float((plain_P[known] * decoded_P[known]).sum())
    return ArmStatistics(
        speedup=quantiles(plain_P[known] / own_P[known]),
        ratio_of_sums=plain_s / own_s if own_s else None,
        tokens_per_s=float(decoded_P[known].sum()) / own_s if own_s else None,
        prefill_ms=float(1e3 * np.median(_median_P(result, name, lambda s: s.prefill_s))),
        end_to_end=_end_to_end(result, name),
        **_acceptance(result, name, arm.num_levels if arm.is_speculative else 0, arm.grown is None),
    )
