"""Two processes train to the same weights, also those that only one of them used."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from dreams_nas.distill.recipes import Recipe
from dreams_nas.distill.trainer import StepLoss, train


class _Uneven:
    """Even batches use the first parameter, odd ones the second, none the third."""

    def __init__(self) -> None:
        self.module: nn.Module = nn.ParameterList([torch.ones(2) * k for k in (1.0, 2.0, 3.0)])
        self.batches: list[int] = []

    def before_step(self, *_: Any) -> None:
        """Nothing changes."""

    def num_losses(self, step: int, progress: float) -> int:
        return 1

    def losses(
        self, step: int, batch_index: int, progress: float, want_metrics: bool
    ) -> Iterator[StepLoss]:
        self.batches.append(batch_index)
        used = list(self.module.parameters())[batch_index % 2]
        yield StepLoss((used * (1 + batch_index)).sum(), {})

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""


def main() -> None:
    """What each process runs."""
    task = _Uneven()
    train(task, Recipe(num_steps=4, max_seconds=600, warmup=0.0), quiet=True)
    weights = [p.tolist() for p in task.module.parameters()]
    print(json.dumps({"rank": os.environ["RANK"], "batches": task.batches, "weights": weights}))


@pytest.mark.slow
def test_processes_share_gradients_of_parameters_they_did_not_use() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc_per_node", "2", __file__],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    one, other = sorted(found, key=lambda line: line["rank"])
    assert (one["batches"], other["batches"]) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert one["weights"] == other["weights"]
    first, second, third = one["weights"]
    assert first[0] < 1
    assert second[0] < 2
    assert third == [3.0, 3.0]


if __name__ == "__main__":
    main()
