"""What one draft costs on one deployment: the table's blocks added up to the terms of a round.

    round = [r > 1] t_sync(q = accepted + 1) + sum over levels d = 2..L of t_step(q = w_d)
            + t_tree + t_verify(q = n + 1) + t_commit

All times in milliseconds; kv is the number of rows in the cache before the pass. Every method takes
numbers or arrays and broadcasts.
"""

from dreams_nas.latency.grid import ArrayLike, FloatArray
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.space.tree import StaticTree


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
        self._verify = {mask: table.grid("verify", mask=mask) for mask in ("chain", "tree")}
        self._first = table.grid("draft_layer", position="first", **layer)
        self._next = table.grid("draft_layer", position="next", **layer) if self.depth > 1 else None
        self._fc = table.grid("draft_fc", taps=num_taps)
        self._head = table.grid("draft_head", vocab=sizes.vocab)
        self._fixed = {kind: table.grid("draft_fixed", kind=kind) for kind in ("sync", "step")}
        self._host = {part: table.grid("host", part=part) for part in ("tree", "accept", "commit")}
        self._prefill = (
            table.grid("draft_prefill", depth=self.depth, taps=num_taps, **layer)
            if table.has_block("draft_prefill")
            else None
        )

    def max_verify_rows(self, mask: str = "tree") -> int:
        """Most rows q = n + 1 that a policy may have, as far as verify and host were measured."""
        grids = (self._verify[mask], *self._host.values())
        return min(grid.q_range[1] for grid in grids)

    @property
    def max_step_rows(self) -> int:
        """Most rows w_d of a self-fed draft step that were measured."""
        layers = [self._first] if self._next is None else [self._first, self._next]
        return min(grid.q_range[1] for grid in [*layers, self._head, self._fixed["step"]])

    def t_ar(self, kv: ArrayLike) -> FloatArray:
        """One plain decoding step."""
        return self._step(1, kv)

    def t_verify(self, q: ArrayLike, kv: ArrayLike, mask: str = "tree") -> FloatArray:
        """One verification of q = n + 1 rows."""
        return self._verify[mask](q, kv)

    def t_tree(self, q: ArrayLike) -> FloatArray:
        """Host work between draft and verify, for q = n + 1 rows."""
        return self._host["tree"](q)

    def t_commit(self, q: ArrayLike) -> FloatArray:
        """Accepting and committing, for q = n + 1 rows."""
        return self._host["accept"](q) + self._host["commit"](q)

    def t_sync(self, q: ArrayLike, kv: ArrayLike) -> FloatArray:
        """The draft reads q newly committed rows; the last of them yields level 1."""
        return self._committed_rows(q, kv) + self._head(1)

    def t_step(self, q: ArrayLike, kv: ArrayLike) -> FloatArray:
        """One self-fed draft step of q = w_d rows, all of which go through the head."""
        return self._layers(q, kv) + self._head(q) + self._fixed["step"](q)

    def t_draft_prefill(self, kept_rows: ArrayLike) -> FloatArray:
        """The draft reads the prompt; the last row yields level 1 of the first round.

        Measured where the table has `draft_prefill` entries; otherwise the sum of the blocks at
        that many rows over an empty cache.
        """
        if self._prefill is not None:
            return self._prefill(kept_rows) + self._head(1)
        return self._committed_rows(kept_rows, 0) + self._head(1)

    def _committed_rows(self, q: ArrayLike, kv: ArrayLike) -> FloatArray:
        return self._fc(q) + self._layers(q, kv) + self._fixed["sync"](q)

    def _layers(self, q: ArrayLike, kv: ArrayLike) -> FloatArray:
        first = self._first(q, kv)
        return first if self._next is None else first + (self.depth - 1) * self._next(q, kv)


def mask_kind(tree: StaticTree) -> str:
    """Which verify entries price the tree."""
    return "chain" if tree.is_chain else "tree"
