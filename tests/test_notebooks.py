"""Every notebook runs from top to bottom on a run folder."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from fake_tables import build_table
from test_bench_report import save_search

from dreams_nas.latency.table import save_table

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_stored_without_output(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_table(build_table(), tmp_path / "table.json")
    result = save_search(tmp_path / "search")
    monkeypatch.setenv("DREAMS_NAS_RUN", str(tmp_path))
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    plt.close("all")
    drafts = names["drafts"]
    assert len(drafts) == len(result.evaluations)  # type: ignore[arg-type]
    assert list(drafts.speedup) == sorted(drafts.speedup, reverse=True)  # type: ignore[attr-defined]
