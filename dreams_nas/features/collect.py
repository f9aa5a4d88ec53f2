"""Collecting: the target answers prompts itself, and its features are recorded in shards.

A shard is answered, read and written before the next begins, so a killed run loses one at most.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dreams_nas.core.console import progress, say
from dreams_nas.core.errors import RunError, UserError
from dreams_nas.core.files import check_free_space, format_bytes, hash_json, write_json
from dreams_nas.core.provenance import provenance
from dreams_nas.features.config import CollectConfig
from dreams_nas.features.conversations import Conversation, check_ids
from dreams_nas.features.key import changed_fields, store_key
from dreams_nas.features.prompts import Plan, PlannedPrompt, plan_prompts
from dreams_nas.features.recorder import Recorder
from dreams_nas.features.shards import ShardIndex, Skipped, load_index, save_shard, shard_path
from dreams_nas.features.store import (
    MANIFEST,
    FeatureStore,
    Manifest,
    load_features,
    load_manifest,
)
from dreams_nas.targets.huggingface import HuggingFaceTarget

_TOKEN_BYTES = 8
_IMPORTANCE_BYTES = 4
_SAMPLE_BYTES = 1024
"""Names and lengths of a sample in the headers."""


def collect(
    target: HuggingFaceTarget,
    conversations: Sequence[Conversation],
    config: CollectConfig,
    out_dir: Path | str,
    *,
    split: str = "",
    seed: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> FeatureStore:
    """Let the target answer prompts and record its features.

    A complete store of the same prompts, target and settings in `out_dir` is returned as it is;
    one that was interrupted goes on behind its whole shards.

    Args:
        target: Who answers, greedily.
        conversations: Prompts, at least one.
        config: Layers, lengths, precision.
        out_dir: Folder of the store.
        split: What the prompts are for; recorded.
        seed: Seed that the prompts were made with; recorded.
        overwrite: Replace a store of other prompts, target or settings.
        quiet: Print nothing.

    Raises:
        UserError: No prompts, a broken prompt, another store in the folder, or too little disk.
        RunError: No prompt fits, no answer has a token, or the disk is full.
    """
    folder = Path(out_dir)
    if not conversations:
        raise UserError("the data set is empty; give at least one conversation")
    check_ids(conversations)
    key = store_key(target, conversations, config)
    if _is_complete(folder, key, overwrite):
        say(f"{folder}: features of these prompts are there already", quiet)
        return load_features(folder)
    plan = plan_prompts(target, conversations, config.max_new_tokens, key["max_length"], quiet)
    if not plan.prompts:
        raise RunError(_nothing_fits(plan.skipped))
    job = _Job(target, config, folder, key, plan, tuple(plan.shards(config.shard_size)))
    finished = job.finished_shards()
    job.announce(finished, quiet)
    hashes = {"target_weights": key["weights"], "conversations": key["conversations"]}
    record = provenance("collect", config, seed, inputs=hashes)
    manifest = job.start_manifest(split, record)
    write_json(folder / MANIFEST, manifest)
    job.finish(finished, quiet)
    indexes = [finished[number] for number in range(len(job.shards))]
    if not any(index.samples for index in indexes):
        raise RunError(
            f"none of the {len(plan.prompts)} answers has a token to learn from; is the target's "
            "chat template the one it was trained with?"
        )
    _remove_surplus(folder, len(job.shards))
    order = [conversation.id for conversation in conversations]
    write_json(folder / MANIFEST, manifest.finished(order, indexes))
    return load_features(folder)


def _is_complete(folder: Path, key: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether the folder holds exactly these features already.

    Raises:
        UserError: It holds others, and they are not to be replaced.
    """
    try:
        manifest = load_manifest(folder)
    except UserError:
        if not overwrite:
            raise
        return False
    if manifest is None:
        return False
    if manifest.key_hash != hash_json(key):
        if overwrite:
            return False
        raise UserError(
            f"{folder}: holds features collected otherwise "
            f"({'; '.join(changed_fields(manifest.key, key))}); give another --out, or replace "
            "them with --force"
        )
    indexes = [load_index(folder, number) for number in range(manifest.num_shards)]
    return manifest.is_complete and all(
        index is not None and index.key_hash == manifest.key_hash for index in indexes
    )


def _nothing_fits(skipped: Sequence[Skipped]) -> str:
    first = min(skipped, key=lambda s: s.needed_tokens or 0)
    return (
        f"none of the {len(skipped)} prompts fits: even the shortest, sample '{first.id}', needs "
        f"{first.needed_tokens} tokens with its longest answer, and the limit is "
        f"{first.limit_tokens}; lower max_new_tokens, raise max_length (up to the target's "
        "positions), or use smaller images"
    )


def _remove_surplus(folder: Path, num_shards: int) -> None:
    """Delete shards that another plan has left in the folder."""
    kept = {shard_path(folder, number) for number in range(num_shards)}
    for path in folder.glob("shard-*.safetensors"):
        if path not in kept:
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink()


@dataclass(frozen=True)
class _Job:
    """One call of `collect` with its plan."""

    target: HuggingFaceTarget
    config: CollectConfig
    folder: Path
    key: Mapping[str, Any]
    plan: Plan
    shards: tuple[tuple[PlannedPrompt, ...], ...]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids(self.target.spec.dims.num_layers)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.key["store_dtype"])
        return dtype

    def planned_ids(self, number: int) -> tuple[str, ...]:
        return tuple(prompt.conversation.id for prompt in self.shards[number])

    def finished_shards(self) -> dict[int, ShardIndex]:
        """Whole shards of this key and plan that an earlier run has left."""
        key_hash = hash_json(self.key)
        found = {number: load_index(self.folder, number) for number in range(len(self.shards))}
        return {
            number: index
            for number, index in found.items()
            if index is not None
            and (index.key_hash, index.planned) == (key_hash, self.planned_ids(number))
        }

    def announce(self, finished: Mapping[int, ShardIndex], quiet: bool) -> None:
        """Print the size of the store and what is skipped.

        Raises:
            UserError: Fewer bytes are free than the missing shards may need.
        """
        sizes = [self._largest_bytes(shard) for shard in self.shards]
        done = f", {len(finished)} of them finished" if finished else ""
        say(
            f"{self.folder}: {len(self.plan.prompts)} prompts, layers {list(self.layer_ids)} in "
            f"{self.key['store_dtype']}: at most {format_bytes(sum(sizes))} in {len(sizes)} "
            f"shards{done}",
            quiet,
        )
        if self.plan.skipped:
            first = self.plan.skipped[0]
            say(
                f"{len(self.plan.skipped)} prompts do not fit and are skipped, first '{first.id}' "
                f"({first.needed_tokens} tokens with its answer, limit {first.limit_tokens})",
                quiet,
            )
        missing = [size for number, size in enumerate(sizes) if number not in finished]
        check_free_space(self.folder, sum(missing), "the feature store")

    def _largest_bytes(self, shard: Sequence[PlannedPrompt]) -> int:
        """Size of a shard whose answers all have the greatest length."""
        state_bytes = self.target.spec.dims.hidden * self.dtype.itemsize
        token_bytes = len(self.layer_ids) * state_bytes + _TOKEN_BYTES
        image_bytes = state_bytes + _IMPORTANCE_BYTES
        return sum(
            (prompt.num_tokens + self.config.max_new_tokens) * token_bytes
            + prompt.num_image_tokens * image_bytes
            + _SAMPLE_BYTES
            for prompt in shard
        )

    def start_manifest(self, split: str, record: dict[str, Any]) -> Manifest:
        """Description of the store while its shards are being made."""
        return Manifest(
            is_complete=False,
            key=dict(self.key),
            key_hash=hash_json(self.key),
            target=self.target.spec,
            target_layer_ids=self.layer_ids,
            dtype=self.key["store_dtype"],
            split=split,
            num_shards=len(self.shards),
            skipped=self.plan.skipped,
            provenance=record,
        )

    def finish(self, finished: dict[int, ShardIndex], quiet: bool) -> None:
        """Compute and write what is missing, and add it to `finished`.

        Raises:
            RunError: The disk is full; whole shards stay valid.
        """
        missing = [number for number in range(len(self.shards)) if number not in finished]
        if not missing:
            return
        recorder = Recorder(
            self.target,
            self.layer_ids,
            self.dtype,
            self.config.max_new_tokens,
            self.config.batch_tokens,
        )
        num_prompts = sum(len(self.shards[number]) for number in missing)
        started, num_tokens = time.perf_counter(), 0
        with progress("collecting answers", num_prompts, quiet) as bar:
            for number in missing:
                recordings, skipped = recorder.record(self.shards[number], bar)
                finished[number] = save_shard(
                    self.folder,
                    number,
                    hash_json(self.key),
                    self.planned_ids(number),
                    recordings,
                    skipped,
                )
                num_tokens += sum(recording.num_answer_tokens for recording in recordings)
        seconds = time.perf_counter() - started
        say(
            f"{num_prompts} prompts answered with {num_tokens} tokens in {seconds:.0f} s "
            f"({num_tokens / seconds:.0f} tokens/s)",
            quiet,
        )
