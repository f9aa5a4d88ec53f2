"""A machine on which drafting costs next to nothing, or far too much, whatever the draft."""

from typing import Any

import pytest

from dreams_nas.latency.table import LatencyTable
from dreams_nas.pipeline import run as run_module
from dreams_nas.pipeline.search import FinalistTimer
from dreams_nas.search.objective import Evaluation


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which drafting costs next to nothing, so that even random drafts pay."""
    scale_drafts(monkeypatch, 1e-4)

    def measure(self: FinalistTimer, finalists: list[Evaluation]) -> list[float]:
        return [one.speedup for one in finalists]

    monkeypatch.setattr(FinalistTimer, "__call__", measure)


def scale_drafts(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    profile = run_module.profile

    def scaled(*arguments: Any, **options: Any) -> LatencyTable:
        table = profile(*arguments, **options)
        step = {e.kv: e for e in table.entries if e.block == "target_step"}
        entries = []
        for entry in table.entries:
            times = {k: getattr(entry, k) for k in ("median_ms", "p10_ms", "p90_ms")}
            if entry.block == "verify" and factor < 1:  # a pass costs what a plain step costs
                times = {k: getattr(step[entry.kv], k) for k in times}
            elif entry.block not in ("target_step", "target_prefill"):
                times = {k: factor * v for k, v in times.items()}
            entries.append(entry.replace(**times))
        return table.replace(entries=tuple(entries))

    monkeypatch.setattr(run_module, "profile", scaled)
