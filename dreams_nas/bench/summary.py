"""A bench for machines and for people: the JSON line, the table with its conditions, the folder."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreams_nas.bench.arms import Arm
from dreams_nas.bench.artefacts import BENCH_FILES, BENCH_SCHEMA
from dreams_nas.bench.stage import BenchReport
from dreams_nas.bench.statistics import Quantiles
from dreams_nas.core.console import format_cell, markdown_table
from dreams_nas.core.device import peak_bytes
from dreams_nas.core.files import atomic_dir, atomic_write_text, require_own_folder, write_json

HEADERS = (
    "arm",
    "speedup measured",
    "p10",
    "p90",
    "speedup predicted",
    "tokens/s",
    "tau",
    "rate",
    "levels",
    "nodes",
    "prefill ms",
)

DEFINITIONS = (
    "speedup measured: median, tenth and ninetieth percentile over prompts of plain seconds per "
    "token / this arm's; the draft's prefill counts, the target's does not.",
    "speedup predicted: median over prompts of the same ratio, from the latency table; '-' where "
    "nothing was predicted.",
    "tau (acceptance length): generated tokens / verify rounds, sum over sum, bonus tokens in, the "
    "prefill's token out.",
    "rate (acceptance rate): accepted tokens / levels of the tree, over all rounds.",
    "generate, prompt_lookup: transformers' own greedy decoding of the same model object; "
    "prompt lookup gains tokens in its first pass, which counts as the prefill.",
    "'-': not measured, or nothing is drafted.",
)


def arm_line(report: BenchReport, arm: Arm) -> dict[str, Any]:
    """One arm for machines."""
    statistics = report.statistics[arm.name]
    predicted = report.predicted.get(arm.name)
    return {
        **statistics.model_dump(mode="json"),
        "speedup_predicted": predicted.model_dump() if predicted is not None else None,
        "policy": arm.describe_policy(),
        "arch": arm.draft.config.arch.model_dump(mode="json") if arm.draft is not None else None,
        "shares": report.shares.get(arm.name),
    }


def summary_line(
    report: BenchReport, seconds_by_stage: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What `bench` and `demo` print as their last line; null is what was not measured.

    Args:
        report: The bench.
        seconds_by_stage: Of the whole run; the bench's own by default.
    """
    winner = report.winner
    statistics = report.statistics.get(winner.name) if winner is not None else None
    predicted = report.predicted.get(winner.name) if winner is not None else None
    seconds = dict(seconds_by_stage if seconds_by_stage is not None else report.seconds_by_stage)
    lossless, lockstep = report.losslessness, report.lockstep
    return {
        "mismatched_tokens": lossless.mismatched_tokens,
        "explained_near_ties": lossless.explained_near_ties,
        "num_tokens_checked": lossless.num_tokens_checked,
        "acceptance_length": statistics.acceptance_length if statistics is not None else None,
        "acceptance_length_replayed": lockstep.acceptance_length_replayed if lockstep else None,
        "num_rounds_differing": lockstep.num_rounds_differing if lockstep else None,
        "speedup_measured": _dump(statistics.speedup if statistics is not None else None),
        "speedup_predicted": _dump(predicted),
        "winner_over_eagle3": _dump(report.winner_over_eagle3),
        "plain_over_generate": _dump(report.plain_over_generate),
        "verify_over_forward": _dump(report.verify_over_forward),
        "adaptive_over_best_fixed": _dump(report.adaptive_over_best_fixed),
        "calibration_error": report.calibration_error,
        "shares": report.shares.get(winner.name) if winner is not None else None,
        "winner": winner_line(winner),
        "arms": {arm.name: arm_line(report, arm) for arm in report.result.arms},
        "num_prompts": len(report.result.prompts),
        "num_passes": report.result.config.num_passes,
        "seconds_total": sum(seconds.values()),
        "seconds_by_stage": seconds,
        "peak_bytes": peak_bytes(),
        "deployment": report.deployment.model_dump(mode="json"),
    }


def winner_line(winner: Arm | None) -> dict[str, Any] | None:
    """Architecture and policy of the winner; None when the answer is not to speculate."""
    if winner is None or winner.draft is None:
        return None
    return {
        "arch": winner.draft.config.arch.model_dump(mode="json"),
        "policy": winner.describe_policy(),
    }


def _dump(value: Quantiles | None) -> dict[str, float] | None:
    return value.model_dump() if value is not None else None


def table_rows(report: BenchReport) -> list[list[Any]]:
    """Rows under `HEADERS`, in the order of the arms."""
    rows = []
    for arm in report.result.arms:
        s, predicted = report.statistics[arm.name], report.predicted.get(arm.name)
        measured = [s.speedup.median, s.speedup.p10, s.speedup.p90] if s.speedup else [None] * 3
        rows.append(
            [
                arm.name,
                *measured,
                predicted.median if predicted is not None else None,
                s.tokens_per_s,
                s.acceptance_length,
                s.acceptance_rate,
                arm.num_levels,
                arm.num_nodes,
                s.prefill_ms,
            ]
        )
    return rows


def conditions(report: BenchReport) -> list[str]:
    """What the numbers hold under; stands above every table."""
    result, deployment = report.result, report.deployment
    num_tokens = sum(sample.num_decoded for sample in result.samples)
    before, after = result.load_cores
    return [
        f"{deployment.device_name}, {deployment.dtype}, {deployment.mode}, attention "
        f"{deployment.attention}, threads {deployment.threads}, batch {deployment.batch}, "
        f"target quantisation {deployment.quantization}",
        f"greedy; {len(result.prompts)} prompts x {result.config.num_passes} passes x "
        f"{len(result.arms)} arms, interleaved; {num_tokens:,} tokens decoded, at most "
        f"{result.config.max_new_tokens} an answer; {result.config.num_warmup} prompts of warm-up",
        f"load of other processes {before:.2f} cores before, {after:.2f} after",
    ]


def findings(report: BenchReport) -> list[str]:
    """Losslessness, replay and the comparison with EAGLE-3, one sentence each."""
    lossless = report.losslessness
    lines = [
        f"Lossless: {lossless.mismatched_tokens} mismatched tokens, "
        f"{lossless.explained_near_ties} explained near-ties, "
        f"{lossless.num_tokens_checked:,} tokens compared."
    ]
    if lockstep := report.lockstep:
        lines.append(
            f"Lockstep replay of {lockstep.arm}: tau "
            f"{format_cell(lockstep.acceptance_length_replayed)} (decoded: "
            f"{format_cell(lockstep.acceptance_length)}); {lockstep.num_rounds_differing} of "
            f"{lockstep.num_rounds} rounds differ."
        )
    if ratio := report.winner_over_eagle3:
        lines.append(
            f"Winner over eagle3 (paired time ratios, above 1 the winner is faster): median "
            f"{ratio.median:.3f}, p10 {ratio.p10:.3f}, p90 {ratio.p90:.3f}."
        )
    if ratio := report.plain_over_generate:
        lines.append(
            f"Plain decoding here over transformers' generate (paired time ratios, above 1 ours is "
            f"faster): median {ratio.median:.3f}, p10 {ratio.p10:.3f}, p90 {ratio.p90:.3f}."
        )
    if ratio := report.adaptive_over_best_fixed:
        lines.append(
            f"Adaptive over the best fixed policy of the winner (paired time ratios, above 1 "
            f"adaptive is faster): median {ratio.median:.3f}, p10 {ratio.p10:.3f}, p90 "
            f"{ratio.p90:.3f}; calibration error {format_cell(report.calibration_error)}."
        )
    if ratio := report.verify_over_forward:
        lines.append(
            f"The winner's verification over decoder and head called bare: median "
            f"{ratio.median:.3f}, p10 {ratio.p10:.3f}, p90 {ratio.p90:.3f}."
        )
    for name, parts in report.shares.items():
        told = ", ".join(f"{part} {100 * share:.1f} %" for part, share in parts.items())
        lines.append(f"Time of {name}'s rounds: {told}.")
    if report.winner is None:
        lines.append("No winner: plain decoding is the answer here.")
    return lines


def length_rows(report: BenchReport) -> list[list[Any]]:
    """End-to-end speedup by answer length: arm, tokens, prompts, speedup."""
    return [
        [arm.name, f"{g.min_tokens}-{g.max_tokens}", g.num_prompts, g.speedup]
        for arm in report.result.arms
        if arm.is_speculative
        for g in report.statistics[arm.name].end_to_end
    ]


def summary_markdown(report: BenchReport) -> str:
    """The page of a bench folder."""
    parts = ["# Bench", "\n".join(f"- {line}" for line in conditions(report))]
    parts.append(markdown_table(HEADERS, table_rows(report)))
    parts.append("\n".join(f"- {line}" for line in DEFINITIONS))
    parts += findings(report)
    if rows := length_rows(report):
        parts.append("End to end, the target's prefill included, by length of the answer:")
        parts.append(markdown_table(("arm", "answer tokens", "prompts", "speedup"), rows))
    return "\n\n".join(parts) + "\n"


_CSV_COLUMNS = (
    "prompt",
    "pass",
    "arm",
    "position",
    "num_tokens",
    "num_rounds",
    "num_accepted",
    "prefill_s",
    "decode_s",
    "seconds_per_token",
)


def prompts_csv(report: BenchReport) -> str:
    """One row per prompt, pass and arm, in the order of time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for s in report.result.samples:
        prompt_id = report.result.prompts[s.prompt].id
        per_token = "" if s.seconds_per_token is None else f"{s.seconds_per_token:.9f}"
        times = [f"{s.prefill_s:.9f}", f"{s.decode_s:.9f}", per_token]
        counts = [len(s.tokens), len(s.accepted), sum(s.accepted)]
        writer.writerow([prompt_id, s.pass_index, s.arm, s.position, *counts, *times])
    return text.getvalue()


def bench_record(report: BenchReport, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What `bench.json` holds: the summary, everything it stands on, and where it came from."""
    result = report.result
    return {
        "schema_version": BENCH_SCHEMA,
        "summary": summary_line(report),
        "conditions": conditions(report),
        "definitions": list(DEFINITIONS),
        "findings": findings(report),
        "table": {"headers": list(HEADERS), "rows": table_rows(report)},
        "target": report.target.model_dump(mode="json"),
        "config": result.config.model_dump(mode="json"),
        "load_cores": {"before": result.load_cores[0], "after": result.load_cores[1]},
        "losslessness": report.losslessness.model_dump(mode="json"),
        "lockstep": report.lockstep.model_dump(mode="json") if report.lockstep else None,
        "prompt_ids": [prompt.id for prompt in result.prompts],
        "provenance": dict(provenance),
    }


def save_bench(report: BenchReport, folder: Path | str, provenance: Mapping[str, Any]) -> None:
    """Write bench.json, prompts.csv and summary.md; the folder appears or changes as a whole.

    Args:
        report: The bench.
        folder: Where to.
        provenance: From `core.provenance.provenance`.

    Raises:
        UserError: The folder holds something else.
        RunError: The disk is full.
    """
    require_own_folder(Path(folder), BENCH_FILES)
    with atomic_dir(folder) as temporary:
        write_json(temporary / "bench.json", bench_record(report, provenance))
        atomic_write_text(temporary / "prompts.csv", prompts_csv(report))
        atomic_write_text(temporary / "summary.md", summary_markdown(report))
