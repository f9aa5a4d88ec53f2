"""The own format: a folder that `load_draft` reads, with a model card and its provenance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dreams_nas.core.errors import RunError, UserError, unknown_error
from dreams_nas.core.files import (
    atomic_dir,
    atomic_write_text,
    read_json,
    require_own_folder,
    write_json,
)
from dreams_nas.core.provenance import provenance
from dreams_nas.draft.config import DraftConfig
from dreams_nas.draft.model import DraftModel, load_draft
from dreams_nas.export.card import model_card
from dreams_nas.export.config import ExportConfig

FILES = ("config.json", "model.safetensors", "README.md", "provenance.json")
"""What an export holds."""
FORMATS = ("dreams-nas",)
"""Formats that can be written."""


def export(config: ExportConfig) -> DraftConfig:
    """Export a draft folder.

    Returns:
        What the exported checkpoint says of itself.

    Raises:
        UserError: Unknown format, missing or broken draft, a file in the way, or a bench of other
            drafts.
        RunError: The disk is full, or what was written does not read back equal.
    """
    if config.format not in FORMATS:
        raise unknown_error("export format", config.format, FORMATS)
    if not config.draft:
        raise UserError("there is no draft to export; give --draft DIR")
    source = Path(config.draft)
    draft = load_draft(source)
    bench = None if config.bench is None else read_bench(Path(config.bench))
    inputs: dict[str, Path | str] = {"draft": source}
    if config.bench is not None:
        inputs["bench"] = _bench_path(Path(config.bench))
    save_export(draft, Path(config.out), provenance("export", config, inputs=inputs), bench)
    return draft.config


def save_export(
    draft: DraftModel,
    folder: Path,
    origin: Mapping[str, Any],
    bench: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json, model.safetensors, README.md and provenance.json; then read them back.

    The folder appears, or replaces an older one, only after the check.

    Args:
        draft: What to export; its own policy is the one that the card states.
        folder: Where to.
        origin: From `core.provenance.provenance`.
        bench: A bench.json whose table goes into the card.

    Raises:
        UserError: The folder holds something that is no export, or the bench has no such draft.
        RunError: The disk is full, or what was written does not read back equal.
    """
    require_own_folder(folder, FILES)
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if found and "provenance.json" not in found:
        raise UserError(
            f"{folder}: holds a draft or a target that no export wrote, and it would be replaced; "
            "choose an empty or a new folder"
        )
    card = model_card(draft.config, bench)
    with atomic_dir(folder) as temporary:
        draft.save(temporary)
        atomic_write_text(temporary / "README.md", card)
        write_json(temporary / "provenance.json", dict(origin))
        check_export(draft, temporary)


def check_export(draft: DraftModel, folder: Path) -> None:
    """Read an export strictly and compare every tensor with its source, bit by bit.

    Raises:
        RunError: Something is missing, additional or different.
    """
    try:
        reloaded = load_draft(folder)
    except UserError as error:
        raise RunError(f"the export cannot be read back: {error}") from error
    if reloaded.config != draft.config:
        raise RunError(f"{folder / 'config.json'} does not read back equal")
    source, stored = draft.to_tensors(), load_file(folder / "model.safetensors")
    if unlike := sorted(set(source) ^ set(stored)):
        raise RunError(f"the export has missing or additional tensors: {', '.join(unlike)}")
    for name, tensor in source.items():
        other = stored[name]
        if other.dtype != tensor.dtype or not torch.equal(other, tensor.cpu()):
            raise RunError(f"tensor '{name}' does not read back equal to its source")


def read_bench(path: Path) -> dict[str, Any]:
    """Read a bench.json, given itself or its folder.

    Raises:
        UserError: Missing or broken, or not a bench.
    """
    path = _bench_path(path)
    data = read_json(path)
    if not isinstance(data, dict) or data.get("schema_version") != "dreams-nas/bench/1":
        raise UserError(f"{path}: is no bench.json that `dreams-nas bench` wrote")
    return data


def _bench_path(path: Path) -> Path:
    return path / "bench.json" if path.is_dir() else path
