"""Training checkpoints: weights, moments and averages in one file, the rest as JSON beside it.

Both lie in a folder that is replaced as a whole, so that a kill at any byte leaves the last
complete state. The log is written with it and never holds steps that a resumed run does again.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.core.files import atomic_dir, atomic_write_text, read_json, recover_dir, to_json

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class TrainState:
    """Where a training stands, tensors left out."""

    fingerprint: dict[str, Any]
    """Recipe, seed and data; a resumed run must have the same."""
    step: int = 0
    """Optimiser steps done."""
    seconds: float = 0.0
    """Time spent on them."""
    task: dict[str, Any] = field(default_factory=dict)
    """The task's own state."""
    log: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the log so far."""


def write_log(folder: Path, log: list[dict[str, Any]]) -> None:
    """Write `training_log.jsonl`, a line per logged step."""
    text = "".join(to_json(line) + "\n" for line in log)
    atomic_write_text(folder / "training_log.jsonl", text)


def save_checkpoint(
    folder: Path,
    state: TrainState,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    averages: Mapping[str, Tensor],
) -> None:
    """Replace the checkpoint in a training's folder."""
    tensors = {f"weight.{name}": p.detach() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value
    tensors |= {f"average.{name}": average for name, average in averages.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_dir(folder / "checkpoint") as temporary:
        cpu = {name: t.cpu().contiguous() for name, t in tensors.items()}
        save_file(cpu, temporary / "state.safetensors", metadata={"format": "pt"})
        (temporary / "state.json").write_text(to_json(asdict(state), indent=2), encoding="utf-8")
    write_log(folder, state.log)


@torch.no_grad()
def load_checkpoint(
    folder: Path,
    expected: TrainState,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    averages: Mapping[str, Tensor],
) -> TrainState | None:
    """Load the checkpoint of a training's folder into weights, moments and averages.

    Returns:
        Where that training stood; None when there is no checkpoint.

    Raises:
        UserError: The checkpoint belongs to another training, or cannot be read.
    """
    path = folder / "checkpoint"
    recover_dir(path)
    if not path.is_dir():
        return None
    try:
        state = TrainState(**read_json(path / "state.json"))
        tensors = load_file(path / "state.safetensors")
    except Exception as error:  # safetensors raises its own, untyped error
        raise UserError(f"{path}: cannot be read ({error}); remove it to start again") from error
    _require_same(path, expected.fingerprint, state.fingerprint)
    if missing := sorted(f"weight.{n}" for n in parameters if f"weight.{n}" not in tensors):
        raise UserError(f"{path}: lacks tensors {missing[:3]}; remove it to start again")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[f"weight.{name}"])
        if name in averages:
            averages[name].copy_(tensors[f"average.{name}"])
        if f"step.{name}" in tensors:
            moments = {key: tensors[f"{key}.{name}"].to(parameter) for key in _MOMENTS}
            optimizer.state[parameter] = {"step": tensors[f"step.{name}"], **moments}
    return state


def remove_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of a training whose result has been saved."""
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def _require_same(path: Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for key in sorted(set(wanted) | set(found)):
        old, new = found.get(key), wanted.get(key)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                key = next(k for k in sorted(set(old) | set(new)) if old.get(k) != new.get(k))
                old, new = old.get(key), new.get(key)
            raise UserError(
                f"{path} is of a training with {key} = {old}, this one has {new}; give it back, or "
                "remove that folder to start again"
            )
