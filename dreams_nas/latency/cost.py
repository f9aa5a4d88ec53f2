"""What one draft costs on one deployment: the table's blocks added up to the terms of a round.

    round = [r > 1] t_sync(q = accepted + 1) + sum over levels d = 2..L of t_step(q = w_d)
            + t_tree + t_verify(q = n + 1) + t_commit

A sync is no step of as many rows: it finds the processor's caches swept by the target, and its last
layer runs queries and feed-forward for one row only. So it has blocks of its own.

All times in milliseconds; kv is the number of rows in the cache before the pass. Every method takes
numbers or arrays and broadcasts.
"""

import numpy as np

from dreams_nas.latency.blocks import group_key
from dreams_nas.latency.grid import ArrayLike, FloatArray
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.space.tree import StaticTree

_MASKS = ("chain", "tree")
_PARTS = ("tree", "accept", "commit")


class CostModel:
    """Times of target, draft and host for one draft architecture."""

    def __init__(self, table: LatencyTable, arch: DraftArch, dims: TargetDims) -> None:
        """Find the draft's blocks.

        Raises:
            UserError: The table lacks one of them.
        """
        sizes = arch.sizes(dims)
        self.depth = arch.depth
        layer = {"num_kv_heads": sizes.num_kv_heads, "ffn": sizes.ffn}
        num_taps = len(sizes.target_layer_ids)
        self._step = table.grid("target_step")
        self._verify = {mask: table.grid("verify", mask=mask) for mask in _MASKS}
        self._first = table.grid("draft_layer", position="first", **layer)
        self._next = table.grid("draft_layer", position="next", **layer) if self.depth > 1 else None
        self._fc = table.grid("draft_fc", taps=num_taps)
        self._sync = table.grid("draft_sync", depth=self.depth, **layer)
        self._level_1 = table.grid("draft_head", vocab=sizes.vocab, kind="sync")
        self._head = table.grid("draft_head", vocab=sizes.vocab, kind="step")
        self._fixed = table.grid("draft_fixed")
        self._host = {
            mask: {part: table.grid("host", part=part, mask=mask) for part in _PARTS}
            for mask in _MASKS
        }
        # Older tables lack what only adaptive policies ask for.
        self._decide = {
            mask: table.grids.get(group_key("host", {"part": "decide", "mask": mask}))
            for mask in _MASKS
        }
        self._prefill = table.grid("draft_prefill", depth=self.depth, taps=num_taps, **layer)

    def max_verify_rows(self, mask: str = "tree") -> int:
        """Most rows q = n + 1 that a policy may have, as far as verify and host were measured."""
        grids = (self._verify[mask], *self._host[mask].values())
        return min(grid.q_range[1] for grid in grids)

    @property
    def max_step_rows(self) -> int:
        """Most rows w_d of a self-fed draft step that were measured."""
        layers = [self._first] if self._next is None else [self._first, self._next]
        return min(grid.q_range[1] for grid in [*layers, self._head, self._fixed])

    @property
    def max_sync_rows(self) -> int:
        """Most rows of a sync that were measured."""
        return min(grid.q_range[1] for grid in (self._sync, self._fc))

    def t_ar(self, kv: ArrayLike) -> FloatArray:
        """One plain decoding step."""
        return self._step(1, kv)

    def t_verify(self, q: ArrayLike, kv: ArrayLike, mask: str = "tree") -> FloatArray:
        """One verification of q = n + 1 rows."""
        return self._verify[mask](q, kv)

    def t_root(self, kv: ArrayLike) -> FloatArray:
        """Verifying the root alone in a round that drafts nothing; a plain step if unmeasured."""
        chain = self._verify["chain"]
        return chain(1, kv) if chain.q_range[0] == 1 else self.t_ar(kv)

    def t_decide(self, q: ArrayLike, mask: str) -> FloatArray:
        """What an adaptive policy adds; 0 where unmeasured.

        Args:
            q: 1 for a level that it drafts; n + 1 for a tree that it verifies.
            mask: `chain` for the former, `tree` for the latter.
        """
        decide = self._decide[mask]
        return np.zeros_like(q, dtype=np.float64) if decide is None else decide(q)

    def t_tree(self, q: ArrayLike, mask: str = "tree") -> FloatArray:
        """Host work between draft and verify, for q = n + 1 rows."""
        return self._host[mask]["tree"](q)

    def t_commit(self, q: ArrayLike, mask: str = "tree") -> FloatArray:
        """Accepting and committing, for q = n + 1 rows."""
        return self._host[mask]["accept"](q) + self._host[mask]["commit"](q)

    def t_sync(self, q: ArrayLike, kv: ArrayLike) -> FloatArray:
        """The draft reads q newly committed rows; the last of them yields level 1."""
        return self._fc(q) + self._sync(q, kv) + self._level_1(1)

    def t_step(self, q: ArrayLike, kv: ArrayLike) -> FloatArray:
        """One self-fed draft step of q = w_d rows, all of which go through the head."""
        return self._layers(q, kv) + self._head(q) + self._fixed(q)

    def t_draft_prefill(self, kept_rows: ArrayLike) -> FloatArray:
        """The draft reads the prompt; the last row yields level 1 of the first round."""
        return self._prefill(kept_rows) + self._level_1(1)

    def _layers(self, q: ArrayLike, kv: ArrayLike) -> FloatArray:
        first = self._first(q, kv)
        return first if self._next is None else first + (self.depth - 1) * self._next(q, kv)


def mask_kind(tree: StaticTree) -> str:
    """Which verify entries price the tree."""
    return "chain" if tree.is_chain else "tree"
