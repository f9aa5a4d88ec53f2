"""`dreams-nas demo --quick` on the embedded target: lossless, replayed, complete; never a speed."""

import json
from pathlib import Path

import pytest
from cheap_drafts import cheap_drafts

from dreams_nas.cli.app import main
from dreams_nas.pipeline.demo import demo_config

__all__ = ["cheap_drafts"]  # a fixture, used by name


@pytest.mark.usefixtures("cheap_drafts")  # a few steps of training do not make a draft that pays
def test_the_quick_demo_is_lossless_and_its_replay_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--quick", "--out", str(tmp_path), "--threads", "1", "--quiet"]) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["mismatched_tokens"] == 0
    assert line["num_tokens_checked"] > 0
    assert line["peak_bytes"] < 4_000_000_000
    assert line["deployment"]["threads"] == 1
    assert line["arms"]["plain"]["acceptance_length"] is None
    assert line["num_rounds_differing"] == 0
    assert line["acceptance_length_replayed"] == line["acceptance_length"]
    assert list(line["arms"]) == ["plain", "winner", "eagle3"]
    assert (tmp_path / "export" / "model.safetensors").is_file()
    page = next((tmp_path / "report").glob("*.md")).read_text()
    assert "speedup" in page


def test_the_lengths_of_the_demo_differ_in_effort_alone() -> None:
    demo, quick, full = (demo_config(n, out="runs") for n in ("demo", "quick", "full"))
    assert demo.space == quick.space == full.space
    assert quick.data.num_test < demo.data.num_test
    assert demo.baseline.kind == quick.baseline.kind == "supernet"
    assert full.baseline.kind == "alone"


def test_contradicting_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--full"]) == 2
    assert "leave one out" in capsys.readouterr().err
