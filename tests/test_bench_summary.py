"""A whole bench on a tiny target: the JSON line, the table, the folder."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import build_arms, build_prompts
from draft_models import build_loud_target

from dreams_nas.bench.arms import PLAIN, Arm
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.stage import BenchReport, bench_arms, require_room
from dreams_nas.bench.statistics import Quantiles
from dreams_nas.bench.summary import (
    HEADERS,
    conditions,
    findings,
    save_bench,
    summary_line,
    summary_markdown,
    table_rows,
)
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import to_json

CONFIG = MeasureConfig(max_new_tokens=16, num_passes=2, num_warmup=1)
KEYS = {
    "mismatched_tokens",
    "explained_near_ties",
    "num_tokens_checked",
    "acceptance_length",
    "acceptance_length_replayed",
    "speedup_measured",
    "speedup_predicted",
    "winner_over_eagle3",
    "winner",
    "arms",
    "seconds_total",
    "seconds_by_stage",
    "peak_bytes",
    "deployment",
}
PREDICTED = Quantiles(median=2.25, p10=1.5, p90=3.0)


@pytest.fixture(scope="module")
def report() -> BenchReport:
    target = build_loud_target("llava", dtype=torch.float32)
    return bench_arms(
        target,
        build_arms(target),
        build_prompts(target, 3),
        CONFIG,
        predicted={"winner": PREDICTED},
        quiet=True,
    )


@pytest.fixture(scope="module")
def plain_report() -> BenchReport:
    target = build_loud_target("llava", dtype=torch.float32)
    return bench_arms(target, [PLAIN], build_prompts(target, 2), CONFIG, quiet=True)


def test_the_line_has_every_key_and_is_json(report: BenchReport) -> None:
    line = json.loads(to_json(summary_line(report)))
    assert set(line) >= KEYS
    assert line["mismatched_tokens"] == 0
    assert line["num_tokens_checked"] > 30
    assert line["acceptance_length"] == line["acceptance_length_replayed"] > 1
    assert line["speedup_predicted"] == {"median": 2.25, "p10": 1.5, "p90": 3.0}
    assert set(line["speedup_measured"]) == {"median", "p10", "p90"}
    assert set(line["winner_over_eagle3"]) == {"median", "p10", "p90"}
    assert line["winner"]["arch"]["tap"] == "last"
    assert line["winner"]["policy"]["kind"] == "static_tree"
    assert list(line["arms"]) == ["plain", "winner", "eagle3"]
    assert line["arms"]["plain"]["speedup"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert line["arms"]["plain"]["acceptance_length"] is None
    assert line["arms"]["plain"]["policy"]["kind"] == "none"
    assert line["arms"]["eagle3"]["policy"] == {
        "kind": "chain",
        "levels": 4,
        "nodes": 4,
        "paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]],
    }
    assert line["arms"]["eagle3"]["speedup_predicted"] is None
    assert line["seconds_total"] == pytest.approx(sum(line["seconds_by_stage"].values()))
    assert line["deployment"]["dtype"] == "float32"
    assert line["deployment"]["threads"] == torch.get_num_threads()


def test_seconds_of_the_whole_run_replace_the_benchs_own(report: BenchReport) -> None:
    line = summary_line(report, {"train": 3.0, "bench": 4.0})
    assert line["seconds_total"] == 7.0
    assert line["seconds_by_stage"] == {"train": 3.0, "bench": 4.0}


def test_without_a_winner_everything_about_it_is_null(plain_report: BenchReport) -> None:
    line = summary_line(plain_report)
    assert set(line) >= KEYS
    for key in (
        "winner",
        "acceptance_length",
        "acceptance_length_replayed",
        "speedup_measured",
        "speedup_predicted",
        "winner_over_eagle3",
    ):
        assert line[key] is None, key
    assert "plain decoding is the answer" in findings(plain_report)[-1]


def test_a_winner_with_the_empty_tree_is_no_winner() -> None:
    target = build_loud_target("llava", dtype=torch.float32)
    arms = build_arms(target)
    arms[1] = Arm("winner", arms[1].draft)
    report = bench_arms(target, arms[:2], build_prompts(target, 1), CONFIG, quiet=True)
    line = summary_line(report)
    assert line["winner"] is None
    assert line["arms"]["winner"]["acceptance_length"] is None


def test_predicted_and_measured_have_a_column_each(report: BenchReport) -> None:
    rows = {row[0]: dict(zip(HEADERS, row, strict=True)) for row in table_rows(report)}
    assert rows["winner"]["speedup predicted"] == 2.25
    assert rows["eagle3"]["speedup predicted"] is None
    assert rows["winner"]["speedup measured"] == report.statistics["winner"].speedup.median  # type: ignore[union-attr]
    assert (rows["winner"]["levels"], rows["winner"]["nodes"]) == (4, 17)


def test_conditions_stand_above_the_table_and_definitions_under_it(report: BenchReport) -> None:
    page = summary_markdown(report)
    table = page.index("| arm |")
    for line in conditions(report):
        assert 0 < page.index(line) < table
    assert "3 prompts x 2 passes x 3 arms" in page
    assert "threads 1" in page
    assert page.index("tau (acceptance length): generated tokens / verify rounds") > table
    assert page.index("rate (acceptance rate)") > table
    assert "Lossless: 0 mismatched tokens" in page


def test_the_folder_holds_one_row_per_prompt_pass_and_arm(
    report: BenchReport, tmp_path: Path
) -> None:
    save_bench(report, tmp_path / "bench", {"command": "bench"})
    with (tmp_path / "bench" / "prompts.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    places = {(r["prompt"], r["pass"], r["arm"]) for r in rows}
    assert len(places) == len(rows) == 3 * 2 * 3
    sample = report.result.samples[4]
    assert rows[4]["arm"] == sample.arm
    assert float(rows[4]["decode_s"]) == pytest.approx(sample.decode_s, abs=1e-9)
    assert float(rows[4]["seconds_per_token"]) == pytest.approx(sample.seconds_per_token, abs=1e-9)
    data: dict[str, Any] = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert data["summary"]["winner"] == summary_line(report)["winner"]
    assert data["target"]["embedding_hash"] == report.target.embedding_hash
    assert data["prompt_ids"] == ["p0", "p1", "p2"]
    assert (tmp_path / "bench" / "summary.md").read_text() == summary_markdown(report)


def test_a_folder_with_anything_else_is_not_replaced(report: BenchReport, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds other files \(thesis.txt\)"):
        save_bench(report, tmp_path, {})
    assert (tmp_path / "thesis.txt").read_text() == "x"


def test_prompts_without_room_are_refused_before_the_clock_starts() -> None:
    target = build_loud_target("llava", dtype=torch.float32)
    prompts = build_prompts(target, 3)
    longest = max(len(p.inputs.input_ids_T) for p in prompts)
    with pytest.raises(UserError, match=rf"at most {512 - longest} new tokens"):
        require_room(target, prompts, 512)
    require_room(target, prompts, 512 - longest)
