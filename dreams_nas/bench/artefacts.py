"""What a run folder holds for its report, read as plain data: every piece may be missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreams_nas.core.config import build_config
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json, read_text
from dreams_nas.latency.table import LatencyTable, load_table
from dreams_nas.space.arch import DraftArch, TargetDims

BENCH_SCHEMA = "dreams-nas/bench/1"
BENCH_FILES = ("bench.json", "prompts.csv", "summary.md")
"""What a bench folder holds."""
SEARCH_SCHEMA = "search-result/1"


@dataclass(frozen=True)
class RunArtefacts:
    """Artefacts of a run, as far as they are there."""

    folder: Path
    table: LatencyTable | None
    """`table.json`."""
    search: dict[str, Any] | None
    """`search/result.json`."""
    front_keys: frozenset[str]
    """Drafts of `search/pareto.csv`, by key."""
    bench: dict[str, Any] | None
    """`bench/bench.json`."""

    @property
    def dims(self) -> TargetDims | None:
        """Sizes of the target, from the bench."""
        if self.bench is None:
            return None
        return build_config(TargetDims, self.bench["target"]["dims"], "bench.json")

    @property
    def winner_arch(self) -> DraftArch | None:
        """The winner of the bench; None when the answer is not to speculate."""
        winner = self.bench["summary"]["winner"] if self.bench is not None else None
        return build_config(DraftArch, winner["arch"], "bench.json") if winner else None


def load_artefacts(folder: Path) -> RunArtefacts:
    """Read a run folder.

    Raises:
        UserError: No folder, nothing in it to report on, or a broken file.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a run (its --out)")
    table, search = folder / "table.json", folder / "search" / "result.json"
    bench, front = folder / "bench" / "bench.json", folder / "search" / "pareto.csv"
    if not any(path.is_file() for path in (table, search, bench)):
        raise UserError(
            f"{folder}: holds none of table.json, search/result.json and bench/bench.json, so "
            "there is nothing to report; give the folder of a run (its --out)"
        )
    return RunArtefacts(
        folder=folder,
        table=load_table(table) if table.is_file() else None,
        search=_read(search, "schema", SEARCH_SCHEMA) if search.is_file() else None,
        front_keys=_first_column(front) if front.is_file() else frozenset(),
        bench=_read(bench, "schema_version", BENCH_SCHEMA) if bench.is_file() else None,
    )


def _read(path: Path, key: str, schema: str) -> dict[str, Any]:
    data = read_json(path)
    found = data.get(key) if isinstance(data, dict) else None
    if found != schema:
        raise UserError(f"{path}: {key} is {found!r}, expected {schema!r}; make it again")
    return dict(data)


def _first_column(path: Path) -> frozenset[str]:
    return frozenset(line.partition(",")[0] for line in read_text(path).splitlines()[1:])
