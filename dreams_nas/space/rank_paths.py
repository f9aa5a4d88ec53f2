"""Rank paths: what replay records of one draft, enough to price every static tree without torch.

Shapes: P prompts, R roots of all prompts one after the other, L recorded levels. The answer of a
prompt has A tokens, counted from 0; token 0 comes from prefill. Root i is the state in which token
i is the last committed one; its level d proposes token i + d. Roots are 0 .. A - 2: after the last
token there is nothing left to propose.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dreams_nas.core.errors import UserError
from dreams_nas.core.files import atomic_write_bytes

SCHEMA = "rank-paths/1"

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankPaths:
    """Ranks of the recorded answers' tokens under one draft with one vocabulary size."""

    ranks_RL: npt.NDArray[np.int32]
    """Rank (0 is the draft's best guess) of answer token i + d at level d of root i; -1 where the
    token is outside the draft's vocabulary or beyond the end of the answer."""
    answer_lengths_P: IntArray
    """Answer tokens of each prompt, the one from prefill included."""
    prompt_lengths_P: IntArray
    """Target rows of each prompt, text and image tokens."""
    kept_rows_P: IntArray
    """Draft rows of each prompt after its prefill: the prompt's rows that the draft sees."""
    num_vocab: int
    """Head rows of the draft: ranks lie below it."""
    ids: tuple[str, ...] = field(default=())
    """Sample id of each prompt; empty when they do not matter."""

    def __post_init__(self) -> None:
        num_prompts = len(self.answer_lengths_P)
        per_prompt = (self.prompt_lengths_P, self.kept_rows_P)
        assert all(len(values) == num_prompts for values in per_prompt), "one value per prompt"
        assert not self.ids or len(self.ids) == num_prompts, "one id per prompt"
        assert self.ranks_RL.ndim == 2, "ranks are [roots, levels]"
        assert len(self.ranks_RL) == int(self.num_roots_P.sum()), "one row per root"
        assert self.ranks_RL.size == 0 or self.ranks_RL.min() >= -1, "ranks are -1 or above"
        assert self.ranks_RL.size == 0 or self.ranks_RL.max() < self.num_vocab, "ranks < vocabulary"

    @classmethod
    def from_prompts(
        cls,
        ranks: Sequence[npt.NDArray[Any]],
        *,
        prompt_lengths: Sequence[int],
        kept_rows: Sequence[int],
        num_vocab: int,
        ids: Sequence[str] = (),
    ) -> "RankPaths":
        """Join prompts.

        Args:
            ranks: For each prompt the ranks of its roots, [A - 1, levels].
            prompt_lengths: Target rows of each prompt.
            kept_rows: Draft rows of each prompt.
            num_vocab: Head rows of the draft.
            ids: Sample id of each prompt.
        """
        assert ranks, "at least one prompt"
        return cls(
            ranks_RL=np.concatenate(ranks).astype(np.int32),
            answer_lengths_P=np.array([len(rows) + 1 for rows in ranks], dtype=np.int64),
            prompt_lengths_P=np.array(prompt_lengths, dtype=np.int64),
            kept_rows_P=np.array(kept_rows, dtype=np.int64),
            num_vocab=num_vocab,
            ids=tuple(ids),
        )

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.answer_lengths_P)

    @property
    def num_levels(self) -> int:
        """L: the deepest tree that can be priced."""
        return int(self.ranks_RL.shape[1])

    @cached_property
    def num_roots_P(self) -> IntArray:
        """Roots of each prompt: its answer tokens but for the last."""
        return np.maximum(self.answer_lengths_P - 1, 0)

    @cached_property
    def starts_P(self) -> IntArray:
        """Index of each prompt's root 0 in `ranks_RL`."""
        return np.concatenate([[0], np.cumsum(self.num_roots_P)[:-1]]).astype(np.int64)

    @cached_property
    def prompt_R(self) -> IntArray:
        """Prompt of each root."""
        return np.repeat(np.arange(self.num_prompts), self.num_roots_P)

    @cached_property
    def offset_R(self) -> IntArray:
        """i of each root: the answer token that is its last committed one."""
        return np.arange(len(self.prompt_R)) - self.starts_P[self.prompt_R]

    @property
    def target_kv_R(self) -> IntArray:
        """Rows in the target's cache when the root is verified, its own not among them."""
        return self.prompt_lengths_P[self.prompt_R] + self.offset_R

    @property
    def draft_kv_R(self) -> IntArray:
        """Rows in the draft's cache after the sync of the root, level 1 included."""
        return self.kept_rows_P[self.prompt_R] + self.offset_R

    def subset(self, prompts: Sequence[int]) -> "RankPaths":
        """Some of the prompts, in the order given."""
        starts, ends = self.starts_P, self.starts_P + self.num_roots_P
        rows = [np.arange(starts[p], ends[p]) for p in prompts]
        chosen = np.asarray(prompts, dtype=np.int64)
        return RankPaths(
            ranks_RL=self.ranks_RL[np.concatenate(rows)] if rows else self.ranks_RL[:0],
            answer_lengths_P=self.answer_lengths_P[chosen],
            prompt_lengths_P=self.prompt_lengths_P[chosen],
            kept_rows_P=self.kept_rows_P[chosen],
            num_vocab=self.num_vocab,
            ids=tuple(self.ids[p] for p in prompts) if self.ids else (),
        )


_ARRAYS = ("ranks_RL", "answer_lengths_P", "prompt_lengths_P", "kept_rows_P")


def save_rank_paths(paths: RankPaths, path: Path | str) -> None:
    """Write as safetensors, atomically."""
    metadata = {"schema": SCHEMA, "num_vocab": str(paths.num_vocab), "ids": "\n".join(paths.ids)}
    arrays = {name: np.ascontiguousarray(getattr(paths, name)) for name in _ARRAYS}
    atomic_write_bytes(path, save(arrays, metadata=metadata))


def load_rank_paths(path: Path | str) -> RankPaths:
    """Read what `save_rank_paths` wrote.

    Raises:
        UserError: The file is missing, broken or holds something else.
    """
    try:
        with safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                raise UserError(
                    f"{path}: schema is {metadata.get('schema')!r}, expected {SCHEMA!r}; "
                    "run the replay again"
                )
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as rank paths ({error})") from error
    ids = tuple(metadata["ids"].split("\n")) if metadata["ids"] else ()
    return RankPaths(**arrays, num_vocab=int(metadata["num_vocab"]), ids=ids)
