"""A folder of recordings: `manifest.json` and shards, read lazily.

Shapes: T prompt and answer tokens.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.device import Dtype
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json
from dreams_nas.features.recording import Recording
from dreams_nas.features.shards import (
    SampleEntry,
    ShardIndex,
    Skipped,
    load_index,
    open_shard,
    read_recording,
)
from dreams_nas.targets.protocol import TargetSpec

MANIFEST = "manifest.json"
_MAX_OPEN_SHARDS = 32


class Manifest(Config):
    """`manifest.json` of a feature store."""

    schema_version: Literal["dreams-nas/features/1"] = "dreams-nas/features/1"
    """Format of the store."""
    is_complete: bool
    """Whether all shards are there."""
    key: dict[str, Any]
    """Everything the recordings depend on, by name."""
    key_hash: str
    """Hash of `key`."""
    target: TargetSpec
    """Whose answers these are."""
    target_layer_ids: tuple[int, ...]
    """Recorded layers; id k is the output of block k, before the final norm."""
    dtype: Dtype
    """Precision of the features on disk."""
    split: str
    """What the prompts are for: train, choose, score or test; empty if not said."""
    num_shards: int
    """Files of recordings."""
    ids: tuple[str, ...] = ()
    """Ids of the recordings, in the order of the prompts."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all recordings."""
    num_answer_tokens: int = 0
    """Answer tokens of all recordings."""
    num_image_tokens: int = 0
    """Image tokens of all recordings."""
    num_bytes: int = 0
    """Size of the shards."""
    skipped: tuple[Skipped, ...] = ()
    """Prompts without a recording, and why."""
    provenance: dict[str, Any]
    """How the store was made."""

    def finished(self, order: Sequence[str], indexes: Sequence[ShardIndex]) -> "Manifest":
        """The description of the complete store.

        Args:
            order: Ids of all prompts.
            indexes: Descriptions of all shards.
        """
        by_id = {sample.id: sample for index in indexes for sample in index.samples}
        samples = [by_id[id_] for id_ in order if id_ in by_id]
        num_prompt_tokens = sum(sample.prompt_length for sample in samples)
        return self.replace(
            is_complete=True,
            ids=tuple(sample.id for sample in samples),
            num_prompt_tokens=num_prompt_tokens,
            num_answer_tokens=sum(sample.num_tokens for sample in samples) - num_prompt_tokens,
            num_image_tokens=sum(sample.num_image_tokens for sample in samples),
            num_bytes=sum(index.num_bytes for index in indexes),
            skipped=(*self.skipped, *(s for index in indexes for s in index.skipped)),
        )


class FeatureStore(Sequence[Recording]):
    """Recordings in the order of their prompts; a recording is read when it is asked for.

    Tensors are views of mapped files: they cost memory once their pages are touched, and the
    system may take those pages back.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Index a folder; `load_features` is the way in.

        Raises:
            UserError: A shard is missing or damaged, or the store is not complete.
        """
        self.folder = folder
        self.manifest = manifest
        self._opened: OrderedDict[int, Any] = OrderedDict()
        if not manifest.is_complete:
            raise UserError(
                f"{folder}: collecting was not finished; run `dreams-nas collect` with the same "
                "--out again, and it goes on where it stopped"
            )
        places: dict[str, tuple[int, int, SampleEntry]] = {}
        for number in range(manifest.num_shards):
            index = load_index(folder, number)
            if index is None or index.key_hash != manifest.key_hash:
                raise UserError(
                    f"{folder}: shard {number} of {manifest.num_shards} is missing, damaged or of "
                    "another run; run `dreams-nas collect` with the same --out again"
                )
            for slot, entry in enumerate(index.samples):
                places[entry.id] = (number, slot, entry)
        self._places = [places[id_] for id_ in manifest.ids]

    @property
    def target(self) -> TargetSpec:
        """Whose answers these are."""
        return self.manifest.target

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Recorded layers, ascending, the last block among them."""
        return self.manifest.target_layer_ids

    @property
    def split(self) -> str:
        """What the prompts are for."""
        return self.manifest.split

    @property
    def key_hash(self) -> str:
        """Hash of everything the recordings depend on."""
        return self.manifest.key_hash

    @property
    def entries(self) -> list[SampleEntry]:
        """Lengths and image spans of all recordings, without reading a tensor."""
        return [entry for _, _, entry in self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Recording: ...
    @overload
    def __getitem__(self, index: slice) -> list[Recording]: ...
    def __getitem__(self, index: int | slice) -> Recording | list[Recording]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, slot, entry = self._places[index]
        return read_recording(self._shard(number), slot, entry, self.target_layer_ids)

    def __iter__(self) -> Iterator[Recording]:
        for index in range(len(self)):
            yield self[index]

    def tokens(self, index: int) -> Tensor:
        """Prompt and answer tokens of a recording, [T] int64, without its features."""
        number, slot, _ = self._places[index]
        tokens_T: Tensor = self._shard(number).get_tensor(f"{slot}.tokens")
        return tokens_T

    def answer(self, index: int) -> Tensor:
        """Answer tokens of a recording, int64, without its features."""
        return self.tokens(index)[self._places[index][2].prompt_length :]

    def require_target(self, spec: TargetSpec) -> None:
        """Refuse a target that did not give these answers.

        Raises:
            UserError: Another tokenizer, embedding or shape.
        """
        for name in ("tokenizer_hash", "embedding_hash", "shape_hash"):
            own, other = getattr(self.target, name), getattr(spec, name)
            if own != other:
                raise UserError(
                    f"{self.folder}: features of target '{self.target.name}' with {name} {own}, "
                    f"but target '{spec.name}' has {other}; give the target they were collected "
                    "with, or collect again"
                )

    def _shard(self, number: int) -> Any:
        opened = self._opened.pop(number, None)
        if opened is None:
            opened = open_shard(self.folder, number)
        self._opened[number] = opened
        if len(self._opened) > _MAX_OPEN_SHARDS:
            # Views that are still in use keep their part of the file mapped.
            self._opened.popitem(last=False)
        return opened


def load_manifest(folder: Path | str) -> Manifest | None:
    """Read a store's manifest; None where there is none.

    Raises:
        UserError: It is damaged or of another schema.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return None
    return build_config(Manifest, read_json(path), str(path))


def load_features(folder: Path | str) -> FeatureStore:
    """Open a feature store.

    Raises:
        UserError: No store there, one that is not complete, or a damaged one.
    """
    manifest = load_manifest(folder)
    if manifest is None:
        raise UserError(
            f"{folder}: holds no feature store ({MANIFEST} is missing); make one with "
            f"`dreams-nas collect --out {folder}`"
        )
    return FeatureStore(Path(folder), manifest)
