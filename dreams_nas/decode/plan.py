"""A draft tree turned into the index tensors that a round uses: built once, read every round.

Shapes: N nodes, Q = N + 1 verified rows (the root first), W expanded nodes of a step, R self-fed
rows of a round.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dreams_nas.space.tree import StaticTree


@dataclass(frozen=True)
class LevelPlan:
    """How the nodes of one level come out of one draft pass."""

    num_ranks: int
    """Best guesses needed of every row of the pass."""
    picks: Tensor | None
    """Flat index (row * num_ranks + rank) of each node's token; None when it is all, in order."""
    expanded: Tensor | None
    """Among these nodes, those that the next pass expands, [W]; None when it is all of them."""
    state_rows: Tensor | None
    """Row of this pass whose state each expanded node takes along, [W]; None when it is all."""
    num_expanded: int
    """W; 0 at the last level."""
    step_mask: Tensor | None
    """What the next pass's rows see of the round's self-fed rows, additive [W, R so far]; None
    when each sees all of them."""


@dataclass(frozen=True)
class TreePlan:
    """All that a round needs to know of a static tree."""

    tree: StaticTree
    levels: tuple[LevelPlan, ...]
    depths_Q: Tensor
    """Depth of each verified row; the root is 0."""
    mask_QQ: Tensor | None
    """Additive mask of the verified rows: ancestors and self; None for a lone root."""
    children: tuple[tuple[int, ...], ...]
    """Verified rows below each verified row, the better guess first."""
    lines: tuple[Tensor, ...]
    """Verified rows from the root down to each verified row: on the device, so that keeping an
    accepted path copies nothing there."""
    padded_lines_QL: Tensor
    """The same as one tensor, [Q, L + 1]: short lines repeat their last row."""

    @property
    def num_nodes(self) -> int:
        """Nodes that are verified."""
        return self.tree.num_nodes

    @property
    def num_levels(self) -> int:
        """Longest path."""
        return self.tree.num_levels

    @property
    def num_self_fed(self) -> int:
        """Self-fed draft rows of a round."""
        return sum(level.num_expanded for level in self.levels)

    def describe(self) -> dict[str, Any]:
        """What reports print."""
        return self.tree.describe()


def _all_or_index(index: list[int], total: int, device: torch.device) -> Tensor | None:
    """An index tensor, or None where it would select everything in order."""
    if index == list(range(total)):
        return None
    return torch.tensor(index, device=device)


def _ancestors(tree: StaticTree) -> list[set[int]]:
    """For every node its ancestors and itself."""
    lines: list[set[int]] = []
    for node, parent in enumerate(tree.parents):
        lines.append({node} | (lines[parent] if parent >= 0 else set()))
    return lines


def _pad_lines(lines: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, lines))
    return [line + line[-1:] * (longest - len(line)) for line in lines]


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a row sees another, the lowest number of the type where it does not."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def build_tree_plan(tree: StaticTree, device: torch.device, dtype: torch.dtype) -> TreePlan:
    """Build the plan of a tree with at least one node.

    Args:
        tree: The draft tree.
        device: Where its tensors live.
        dtype: Of the additive masks: the models' own.
    """
    assert tree.num_nodes, "a tree without nodes does not speculate and needs no plan"

    def as_mask(visible: list[list[bool]]) -> Tensor:
        return additive_mask(torch.tensor(visible, device=device), dtype)

    lines = _ancestors(tree)
    nodes_by_level = [
        [i for i, path in enumerate(tree.paths) if len(path) == level]
        for level in range(1, tree.num_levels + 1)
    ]
    levels: list[LevelPlan] = []
    rows = [-1]  # nodes whose rows the current pass holds; -1 is the committed row of the root
    fed: list[int] = []  # nodes fed back so far in the round, in row order
    for depth, nodes in enumerate(nodes_by_level):
        num_ranks = 1 + max(tree.paths[node][-1] for node in nodes)
        picks = [rows.index(tree.parents[n]) * num_ranks + tree.paths[n][-1] for n in nodes]
        expanded = list(tree.expanded[depth]) if depth + 1 < tree.num_levels else []
        fed += expanded
        visible = [[other in lines[node] for other in fed] for node in expanded]
        states = [rows.index(tree.parents[node]) for node in expanded]
        levels.append(
            LevelPlan(
                num_ranks=num_ranks,
                picks=_all_or_index(picks, len(rows) * num_ranks, device),
                expanded=_all_or_index([nodes.index(n) for n in expanded], len(nodes), device),
                state_rows=_all_or_index(states, len(rows), device),
                num_expanded=len(expanded),
                step_mask=None if all(map(all, visible)) else as_mask(visible),
            )
        )
        rows = expanded
    ancestry = [{0}] + [{0} | {node + 1 for node in line} for line in lines]
    visible_QQ = [[other in line for other in range(len(ancestry))] for line in ancestry]
    rows_Q = [sorted(line) for line in ancestry]
    children: list[list[int]] = [[] for _ in ancestry]
    for node, parent in enumerate(tree.parents):
        children[parent + 1].append(node + 1)
    return TreePlan(
        tree=tree,
        levels=tuple(levels),
        depths_Q=torch.tensor([0, *(len(path) for path in tree.paths)], device=device),
        mask_QQ=as_mask(visible_QQ),
        children=tuple(map(tuple, children)),
        lines=tuple(torch.tensor(line, device=device) for line in rows_Q),
        padded_lines_QL=torch.tensor(_pad_lines(rows_Q), device=device),
    )


def extend_mask(mask: Tensor | None, num_seen: int) -> Tensor | None:
    """Put `num_seen` visible columns before a mask, additive or boolean."""
    if mask is None:
        return None
    return torch.nn.functional.pad(mask, (num_seen, 0), value=float(mask.dtype == torch.bool))
