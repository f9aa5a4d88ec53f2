"""`dreams-nas profile`: a table on disk, one JSON line, and clear refusals."""

import json

import pytest
import torch
from target_models import build_target

from dreams_nas.cli.app import main
from dreams_nas.core.files import read_json
from dreams_nas.latency.table import load_table
from dreams_nas.profiling import run

SPACE = """\
tap: [last]
vocab: [0.5]
policy: {kind: chain, levels: [0, 2], nodes: [1, 2]}
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load_placed", lambda _: build_target("llava", dtype=torch.float32))
    (tmp_path / "space.yaml").write_text(SPACE)
    settings = "timer.max_sweeps=1", "timer.min_sweeps=1", "timer.max_regates=0"
    return [
        "profile",
        *("--out", str(tmp_path / "out")),
        *("--space", str(tmp_path / "space.yaml")),
        *("--max-kv", "32", "--budget-s", "0.1", "--threads", "1", "--device", "cpu", "--quiet"),
        *(part for text in settings for part in ("--set", text)),
    ]


def test_it_writes_a_table_and_ends_with_one_json_line(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    *shown, last = capsys.readouterr().out.strip().splitlines()
    summary = json.loads(last)
    table = load_table(tmp_path / "out" / "table.json")
    assert summary["hash"] == table.hash
    assert summary["num_entries"] == len(table.entries)
    assert summary["deployment"]["threads"] == 1
    assert set(summary["rounds"]) >= {"mape", "bias", "p95", "hit_10", "kendall_tau"}
    assert any(line.startswith("draft_layer") for line in shown)
    provenance = read_json(tmp_path / "out" / "provenance.json")
    assert provenance["config"]["max_kv"] == 32
    assert main(arguments) == 2
    assert "is there already; pass --force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--set", "mode=compiled"], "only eager passes can be measured"),
        (["--space", "dem"], "did you mean 'demo'?"),
        (["--max-kv", "0"], "--max-kv: max_kv = 0"),
        (["--max-kv", "600"], "more than the target's 512 positions"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    arguments, tmp_path, capsys, extra, message
):
    assert main([*arguments, *extra]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
