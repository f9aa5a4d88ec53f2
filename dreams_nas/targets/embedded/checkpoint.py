"""Checkpoints of a training run: one safetensors file with weights, moments, RNG and step."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dreams_nas.core.errors import RunError, UserError
from dreams_nas.core.files import atomic_write_bytes

_FILE = "checkpoint.safetensors"


def save_checkpoint(
    folder: Path,
    step: int,
    schedule: dict[str, Any],
    modules: dict[str, nn.Module],
    optimiser: torch.optim.Optimizer,
) -> None:
    """Write the whole state after ``step`` steps, replacing the last one atomically."""
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            tensors[f"{prefix}.{name}"] = parameter.detach().contiguous()
            for key, value in optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{prefix}.{name}.{key}"] = value.detach().contiguous()
    metadata = {"step": str(step), "schedule": json.dumps(schedule)}
    atomic_write_bytes(folder / _FILE, save(tensors, metadata))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint file holds."""

    step: int
    """Steps taken before it was written."""
    tensors: dict[str, Tensor]

    def restore(self, modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer) -> None:
        """Put weights, moments and RNG back as they were."""
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters():
                with torch.no_grad():
                    parameter.copy_(self.tensors[f"{prefix}.{name}"])
                start = f"optimiser.{prefix}.{name}."
                moments = {
                    key.removeprefix(start): tensor
                    for key, tensor in self.tensors.items()
                    if key.startswith(start)
                }
                if moments:
                    optimiser.state[parameter] = moments
        torch.set_rng_state(self.tensors["rng"])


def read_checkpoint(folder: Path, schedule: dict[str, Any]) -> Checkpoint | None:
    """Read the checkpoint of a run folder; None where there is none yet.

    Raises:
        UserError: if the checkpoint was made with another schedule; names the fields.
        RunError: if the file cannot be read.
    """
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is not a readable checkpoint ({error}); delete it") from error
    _check_schedule(path, json.loads(metadata["schedule"]), schedule)
    return Checkpoint(step=int(metadata["step"]), tensors=tensors)


def _check_schedule(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to continue a run under another schedule."""
    keys = sorted(set(found) | set(wanted))
    other = [k for k in keys if found.get(k) != wanted.get(k)]
    if other:
        pairs = ", ".join(f"{k} was {found.get(k)} and is now {wanted.get(k)}" for k in other)
        raise UserError(f"{path} belongs to another run: {pairs}; choose another --out folder")
