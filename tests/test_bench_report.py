"""The report of a run folder: whatever is there becomes tables and plots, nothing else does."""

import struct
from pathlib import Path

import fake_tables
import pytest
import torch
from bench_cases import ARCH, build_arms, build_prompts, space_of
from draft_models import build_loud_target
from fake_objective import SPACE, fake_evaluation

from dreams_nas.bench.arms import PLAIN
from dreams_nas.bench.config import MeasureConfig, ReportConfig
from dreams_nas.bench.report import report, write_report
from dreams_nas.bench.stage import bench_arms
from dreams_nas.bench.summary import save_bench
from dreams_nas.core.errors import UserError
from dreams_nas.latency.table import save_table
from dreams_nas.search.result import SearchResult, save_result
from dreams_nas.search.study import StudyIdentity
from dreams_nas.search.winner import Lift, choose_winner

CONFIG = MeasureConfig(max_new_tokens=16, num_passes=1, num_warmup=0)


def save_search(folder: Path) -> SearchResult:
    found = [fake_evaluation(arch) for arch in SPACE.enumerate(fake_tables.DIMS)]
    result = SearchResult(
        identity=StudyIdentity(space="s", table="t", supernet="n"),
        evaluations=tuple(found),
        choice=choose_winner(found, lambda best: [e.speedup - 0.01 for e in best]),
        lift=(Lift(dimension="vocab", winner=0.25, baseline=1.0, speedup_predicted=2.0, lift=1.1),),
    )
    save_result(result, folder)
    return result


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    target = build_loud_target("llava", dtype=torch.float32)
    result = bench_arms(target, build_arms(target), build_prompts(target, 3), CONFIG, quiet=True)
    save_bench(result, folder / "bench", {})
    save_search(folder / "search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_tables, "DIMS", target.spec.dims)
        save_table(fake_tables.build_table(space_of(ARCH)), folder / "table.json")
    return folder


def is_png(path: Path, min_width: int = 600) -> bool:
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    return data[:8] == b"\x89PNG\r\n\x1a\n" and width >= min_width and height >= 300


def test_the_page_embeds_every_plot_and_every_table(run_dir: Path) -> None:
    page = report(ReportConfig(run_dir=str(run_dir)))
    assert page == run_dir / "report" / "report.md"
    text = page.read_text()
    plots = sorted(path.name for path in page.parent.glob("*.png"))
    assert plots == ["acceptance.png", "latency.png", "pareto.png", "speedup.png"]
    for name in plots:
        assert is_png(page.parent / name)
        assert f"]({name})" in text
    winner = save_search(run_dir / "search").winner
    assert winner is not None
    assert f"| key | {winner.arch.key} |" in text
    assert "| vocab | 0.25 | 1 | 2 | 1.1 |" in text
    assert "3 prompts x 1 passes x 3 arms" in text
    assert "| finalist | speedup predicted | speedup measured |" in text


def test_a_report_replaces_the_older_one_but_nothing_else(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_report(run_dir, out)
    first = (out / "report.md").read_text()
    (out / "report.md").write_text("old")
    write_report(run_dir, out)
    assert (out / "report.md").read_text() == first
    other = tmp_path / "photos"
    other.mkdir()
    (other / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match="holds other files"):
        write_report(run_dir, other)
    assert (other / "holiday.jpg").exists()


def test_what_has_not_run_is_left_out(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes((run_dir / "table.json").read_bytes())
    page = write_report(tmp_path, tmp_path / "report")
    assert "The bench has not run yet" in page.read_text()
    assert [path.name for path in page.parent.glob("*.png")] == ["latency.png"]


def test_a_run_whose_answer_is_plain_decoding_has_a_report(tmp_path: Path) -> None:
    target = build_loud_target("llava", dtype=torch.float32)
    bench = bench_arms(target, [PLAIN], build_prompts(target, 1), CONFIG, quiet=True)
    save_bench(bench, tmp_path / "bench", {})
    page = write_report(tmp_path, tmp_path / "report")
    assert "plain decoding is the answer" in page.read_text()
    assert [path.name for path in page.parent.glob("*.png")] == ["speedup.png"]


def test_folders_that_are_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "none", tmp_path / "report")
    with pytest.raises(UserError, match="nothing to report"):
        write_report(tmp_path, tmp_path / "report")
    with pytest.raises(UserError, match="give the folder of a run"):
        report(ReportConfig())
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench.json").write_text('{"schema_version": "other/1"}')
    with pytest.raises(UserError, match="schema_version is 'other/1'"):
        write_report(tmp_path, tmp_path / "report")
    assert not (tmp_path / "report").exists()
