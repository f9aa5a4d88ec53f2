"""Two files that belong together: `config.json`, and `model.safetensors` stamped with its hash.

Each is written atomically, but a kill can fall between them. The weights come first: they take
long to write, and until their rename the old pair stands whole. A kill right after it leaves new
weights beside an old configuration, which loading notices by the stamp.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.core.files import atomic_path, hash_json, write_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_STAMP = "config_hash"


def _hash(config: Mapping[str, Any], free: Collection[str]) -> str:
    return hash_json({key: value for key, value in config.items() if key not in free})


def save_pair(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    free: Collection[str] = (),
) -> None:
    """Write weights, then configuration.

    Args:
        folder: Where to; made when missing.
        tensors: The weights.
        config: What `config.json` gets.
        free: Keys of it that may change without the weights, so that the stamp leaves them out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The stamp alone: safetensors writes several entries in an order that changes from process to
    # process, and equal checkpoints must be equal files.
    stamp = {_STAMP: _hash(config, free)}
    with atomic_path(folder / WEIGHTS_FILE) as path:
        save_file(dict(tensors), path, metadata=stamp)
    write_json(folder / CONFIG_FILE, config)


def load_weights(
    folder: Path,
    config: Mapping[str, Any],
    what: str,
    device: torch.device | str,
    free: Collection[str] = (),
) -> dict[str, Tensor]:
    """Read the weights that belong to a configuration.

    Weights without a stamp, written by other tools, are taken on trust: their names and shapes are
    the caller's to check.

    Args:
        folder: Holds both files.
        config: What was read from its `config.json`.
        what: Whose weights, for messages.
        device: Where to put them.
        free: As when they were saved.

    Raises:
        UserError: Missing or unreadable weights, or weights saved with another configuration.
    """
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"no {what} weights at {path}; a {what} folder holds {CONFIG_FILE} too")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            stamp = (file.metadata() or {}).get(_STAMP)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own, untyped error
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error
    if stamp is not None and stamp != (own := _hash(config, free)):
        raise UserError(
            f"{path} was saved with another configuration (hash {stamp}) than the one in "
            f"{folder / CONFIG_FILE} (hash {own}): a save was interrupted between the two files, "
            f"or {CONFIG_FILE} was edited or copied; run what wrote this {what} again, or put the "
            f"{CONFIG_FILE} back that belongs to the weights"
        )
    return tensors
