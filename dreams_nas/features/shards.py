"""One file of a feature store: recordings in safetensors, their description in JSON beside it.

The description is written last, so a shard that has one is whole, whenever a run was killed.
Shapes: T prompt and answer tokens, F = L * D tapped features, D hidden, M image tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.files import atomic_path, read_json, write_json
from dreams_nas.features.recording import Recording


class Skipped(Config):
    """A sample that has no recording, and why."""

    id: str
    """Sample id."""
    reason: str
    """What rule it broke."""
    needed_tokens: int | None = None
    """Prompt and longest answer, where that was too long."""
    limit_tokens: int | None = None
    """Longest that was allowed."""


class SampleEntry(Config):
    """A recording as its shard lists it."""

    id: str
    """Sample id."""
    num_tokens: int
    """Prompt and answer tokens."""
    prompt_length: int
    """Prompt tokens."""
    num_image_tokens: int
    """Image tokens among them."""
    image_spans: tuple[tuple[int, int], ...]
    """[start, stop) of the image tokens of each image."""


class ShardIndex(Config):
    """`shard-NNNNN.json`."""

    key_hash: str
    """Hash of the store's key: what the recordings depend on."""
    planned: tuple[str, ...]
    """Ids of the samples that this shard is for."""
    samples: tuple[SampleEntry, ...]
    """Its recordings, in the order of `planned`."""
    skipped: tuple[Skipped, ...]
    """Planned samples without a recording."""
    num_bytes: int
    """Size of the safetensors file."""


def shard_path(folder: Path, number: int) -> Path:
    """Safetensors file of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


def save_shard(
    folder: Path,
    number: int,
    key_hash: str,
    planned: Sequence[str],
    recordings: Sequence[Recording],
    skipped: Sequence[Skipped],
) -> ShardIndex:
    """Write a shard, then its description.

    Raises:
        RunError: The disk is full; earlier shards stay valid.
    """
    tensors: dict[str, torch.Tensor] = {}
    for slot, recording in enumerate(recordings):
        tensors[f"{slot}.tokens"] = recording.tokens_T
        tensors[f"{slot}.features"] = recording.features_TF
        tensors[f"{slot}.image_embeddings"] = recording.image_embeddings_MD
        tensors[f"{slot}.importance"] = recording.importance_M
    path = shard_path(folder, number)
    path.with_suffix(".json").unlink(missing_ok=True)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
    index = ShardIndex(
        key_hash=key_hash,
        planned=tuple(planned),
        samples=tuple(
            SampleEntry(
                id=r.id,
                num_tokens=len(r.tokens_T),
                prompt_length=r.prompt_length,
                num_image_tokens=len(r.importance_M),
                image_spans=r.image_spans,
            )
            for r in recordings
        ),
        skipped=tuple(skipped),
        num_bytes=path.stat().st_size,
    )
    write_json(path.with_suffix(".json"), index)
    return index


def load_index(folder: Path, number: int) -> ShardIndex | None:
    """Description of a whole shard; None where the shard is missing or not as described.

    Raises:
        UserError: The description is no JSON or of another form.
    """
    path = shard_path(folder, number)
    described = path.with_suffix(".json")
    if not described.is_file() or not path.is_file():
        return None
    index = build_config(ShardIndex, read_json(described), str(described))
    return index if path.stat().st_size == index.num_bytes else None


def read_recording(
    opened: Any, slot: int, entry: SampleEntry, layer_ids: tuple[int, ...]
) -> Recording:
    """Recording of an open shard; its tensors are views of the mapped file."""
    return Recording(
        id=entry.id,
        tokens_T=opened.get_tensor(f"{slot}.tokens"),
        prompt_length=entry.prompt_length,
        image_spans=entry.image_spans,
        target_layer_ids=layer_ids,
        features_TF=opened.get_tensor(f"{slot}.features"),
        image_embeddings_MD=opened.get_tensor(f"{slot}.image_embeddings"),
        importance_M=opened.get_tensor(f"{slot}.importance"),
    )


def open_shard(folder: Path, number: int) -> Any:
    """Map a shard into memory; nothing is read until it is used."""
    return safe_open(shard_path(folder, number), framework="pt")
