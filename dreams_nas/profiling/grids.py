"""Which points a search space needs: sizes, rows and cached rows, and no more than that.

What a round costs decides where the points go: verification is most of it and is measured with
every number of rows up to 16; the draft's blocks bend less and have a coarser grid, so that
each of their points is measured more often.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from dreams_nas.core.errors import UserError
from dreams_nas.space.arch import TargetDims
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.space.tree import RankPath, StaticTree

_VERIFY_ROWS = (*range(2, 18), 33, 61, 65)
_DRAFT_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 60, 64)
_REST_ROWS = (1, 4, 16, 64)
_SYNC_ROWS = (1, 2, 4, 7)
_HOST_ROWS = (2, 4, 9, 17, 33, 61)
_PREFILL_ROWS = (1, 64, 256, 1024, 2048)
_MOST_DEFAULT_KV = 2048
_MAX_RANKS = 8
"""Best guesses of one node that `likely_tree` uses; published trees take 4 to 10."""

_Size = TypeVar("_Size", int, tuple[int, int])


@dataclass(frozen=True)
class Grids:
    """Every size that is measured."""

    max_kv: int
    """Most committed rows of the target."""
    verify_rows: tuple[int, ...]
    """q of verification along a tree."""
    chain_rows: tuple[int, ...]
    """q of verification along a chain."""
    step_rows: tuple[int, ...]
    """q of the layers and the head of a self-fed draft step."""
    rest_rows: tuple[int, ...]
    """q of the rest of a self-fed draft step."""
    sync_rows: tuple[int, ...]
    """q of the draft's committed rows: accepted tokens and the bonus."""
    host_rows: tuple[int, ...]
    """q of a round along a tree, for its host work."""
    chain_host_rows: tuple[int, ...]
    """q of a round along a chain, for its host work."""
    prefill_rows: tuple[int, ...]
    """Prompt rows that the draft keeps."""
    layer_sizes: tuple[tuple[int, int], ...]
    """(key/value heads, FFN channels) of draft layers."""
    depths: tuple[int, ...]
    """Draft layers."""
    taps: tuple[int, ...]
    """Numbers of tapped target layers."""
    vocabs: tuple[int, ...]
    """Head rows of drafts."""

    @property
    def max_rows(self) -> int:
        """Most rows of any pass behind the committed ones."""
        return max(self.verify_rows[-1], self.chain_rows[-1])

    @property
    def max_draft_kv(self) -> int:
        """Most rows that a draft pass can find: committed ones and those of earlier steps."""
        return self.max_kv + self.max_rows

    @property
    def mid_kv(self) -> int:
        """Where most of decoding happens, as far as one number can say it."""
        return max(1, self.max_kv // 4)

    @property
    def kv_points(self) -> tuple[int, ...]:
        """Committed rows of the target at which its passes are measured."""
        return tuple(sorted({1, self.mid_kv, self.max_kv}))

    @property
    def sync_kv_points(self) -> tuple[int, ...]:
        """Committed rows of the draft at which a sync is measured."""
        return tuple(sorted({1, self.max_kv}))

    def draft_kv_points(self, num_rows: int) -> tuple[int, ...]:
        """Rows in the draft's cache at which a layer is measured; the bend is seen with few."""
        ends = {1, self.max_draft_kv}
        return tuple(sorted(ends | {self.mid_kv} if num_rows <= 2 else ends))


def default_max_kv(max_positions: int, max_rows: int) -> int:
    """Half of the target's positions, 2,048 at most, and room for one more round."""
    return max(1, min(max_positions // 2, _MOST_DEFAULT_KV, max_positions - max_rows))


def plan_grids(
    space: SearchSpace,
    dims: TargetDims,
    max_positions: int,
    *,
    max_kv: int | None = None,
    max_q: int | None = None,
) -> Grids:
    """The points that this space needs on this target.

    Args:
        space: Drafts and policies that will be searched.
        dims: The target's sizes.
        max_positions: Longest sequence of the target, tokens.
        max_kv: Most committed rows, prompt and answer; None for `default_max_kv`.
        max_q: Most verified rows n + 1; None for the most that the space's policies have.

    Raises:
        UserError: The space does not fit the target, or more rows than it has positions.
    """
    space.validate_for(dims)
    policy = space.policy
    levels = policy.levels[1]
    most_nodes = min(policy.nodes[1], levels) if policy.kind == "chain" else policy.nodes[1]
    rows = max(2, most_nodes + 1 if max_q is None else max_q)
    if rows >= max_positions:
        raise UserError(
            f"max_q = {rows}: the target has {max_positions} positions, and a round needs "
            "committed rows besides its own; lower policy.nodes of the space or --max-q"
        )
    kv = default_max_kv(max_positions, rows) if max_kv is None else max_kv
    if kv + rows > max_positions:
        raise UserError(
            f"max_kv = {kv}: with {rows} rows of a round that is more than the target's "
            f"{max_positions} positions; use --max-kv {max_positions - rows} or less"
        )
    longest_chain = max(2, min(levels + 1, rows))
    # A tree of n nodes expands n - 1 of them at most; a chain expands one a level.
    widest = max(1, rows - 2) if policy.kind == "static_tree" else 1
    sizes = [arch.sizes(dims) for arch in space.enumerate(dims)]
    return Grids(
        max_kv=kv,
        verify_rows=_up_to(_VERIFY_ROWS, rows),
        chain_rows=_up_to(_VERIFY_ROWS, longest_chain),
        step_rows=_up_to(_DRAFT_ROWS, widest),
        rest_rows=_up_to(_REST_ROWS, widest),
        sync_rows=_up_to(_SYNC_ROWS, longest_chain),
        host_rows=_up_to(_HOST_ROWS, rows),
        chain_host_rows=_up_to((2, 4), longest_chain),
        prefill_rows=_up_to(_PREFILL_ROWS, kv),
        layer_sizes=_unique((s.num_kv_heads, s.ffn) for s in sizes),
        depths=_unique(space.depth),
        taps=_unique(len(s.target_layer_ids) for s in sizes),
        vocabs=_unique(s.vocab for s in sizes),
    )


def likely_tree(num_levels: int, num_nodes: int) -> StaticTree:
    """A tree as a search finds them: its nodes are the likeliest if ranks quarter in probability.

    Each further level halves it. The tree may have fewer levels than asked for, and fewer nodes
    where there are no more ranks.
    """
    chosen: list[RankPath] = []
    queue: list[tuple[int, int, RankPath]] = [(1, 1, (0,))]
    while queue and len(chosen) < num_nodes:
        cost, level, path = heapq.heappop(queue)
        chosen.append(path)
        if path[-1] + 1 < _MAX_RANKS:
            heapq.heappush(queue, (cost + 2, level, (*path[:-1], path[-1] + 1)))
        if level < num_levels:
            heapq.heappush(queue, (cost + 1, level + 1, (*path, 0)))
    return StaticTree.from_paths(chosen)


def even_tree(num_rows: int, num_steps: int, num_ranks: int = 1) -> StaticTree:
    """A tree with that many self-fed steps, each of as many rows and with as many guesses a row."""
    lines: list[RankPath] = [(rank,) for rank in range(num_rows)]
    paths = list(lines)
    for _ in range(num_steps):
        paths += [(*lines[0], rank) for rank in range(1, num_ranks)]
        lines = [(*line, 0) for line in lines]
        paths += lines
    return StaticTree.from_paths(paths)


def _up_to(grid: Iterable[int], most: int) -> tuple[int, ...]:
    return tuple(sorted({value for value in grid if value < most} | {most}))


def _unique(values: Iterable[_Size]) -> tuple[_Size, ...]:
    return tuple(sorted(set(values)))
