"""The most frequent rank paths of a replay: the only nodes a good static tree is made of.

A node of level d is counted at every root whose true tokens have its path as their ranks. A child
is counted at most as often as its parent, so the most frequent paths of any number are a tree.
Counts of whole paths, not products of marginals: levels depend on each other.

Shapes: R roots, K paths, most frequent first.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dreams_nas.space.rank_paths import IntArray, RankPaths
from dreams_nas.space.tree import RankPath, StaticTree


@dataclass(frozen=True)
class FrequentPaths:
    """Observed rank paths by falling count; ties go to the shorter, then the lower one."""

    level_K: IntArray
    """Length of each path."""
    rank_K: IntArray
    """Its last rank."""
    parent_K: IntArray
    """Index of its prefix, -1 for the root; always smaller than the path's own index."""
    count_K: IntArray
    """Roots at which it would be accepted."""
    num_roots: int
    """R."""

    def up_to_level(self, num_levels: int, max_nodes: int) -> "FrequentPaths":
        """The most frequent `max_nodes` paths of at most `num_levels` ranks."""
        return self._select(np.flatnonzero(self.level_K <= num_levels)[:max_nodes])

    def up_to_width(self, max_width: int) -> "FrequentPaths":
        """Only children of the `max_width` most frequent paths of each level: w_d stays below."""
        is_chosen = self.level_K == 1
        for level in range(2, int(self.level_K.max(initial=0)) + 1):
            expanded = np.flatnonzero(is_chosen & (self.level_K == level - 1))[:max_width]
            is_chosen |= (self.level_K == level) & np.isin(self.parent_K, expanded)
        return self._select(np.flatnonzero(is_chosen))

    def _select(self, chosen: IntArray) -> "FrequentPaths":
        """Some of the paths, each with its prefixes."""
        new_index = np.full(len(self.level_K) + 1, -1)  # the last entry serves parent -1
        new_index[chosen] = np.arange(len(chosen))
        return FrequentPaths(
            level_K=self.level_K[chosen],
            rank_K=self.rank_K[chosen],
            parent_K=new_index[self.parent_K[chosen]],
            count_K=self.count_K[chosen],
            num_roots=self.num_roots,
        )

    def paths(self, num_nodes: int) -> list[RankPath]:
        """Rank paths of the first `num_nodes`."""
        found: list[RankPath] = []
        nodes = zip(self.parent_K.tolist(), self.rank_K.tolist(), strict=True)
        for parent, rank in list(nodes)[:num_nodes]:
            found.append((*(found[parent] if parent >= 0 else ()), rank))
        return found

    def tree(self, num_nodes: int) -> StaticTree:
        """The tree of the first `num_nodes`."""
        return StaticTree.from_paths(self.paths(num_nodes))


def count_paths(paths: RankPaths, num_levels: int, max_nodes: int) -> FrequentPaths:
    """Count the prefixes of all roots' rank paths.

    Args:
        paths: Recorded ranks.
        num_levels: Longest path to count.
        max_nodes: Paths of each length to keep; as many as the largest tree has nodes are enough.
    """
    levels: list[IntArray] = []
    parents: list[IntArray] = []
    ranks: list[IntArray] = []
    counts: list[IntArray] = []
    alive_R = np.arange(len(paths.ranks_RL))
    node_R = np.zeros(len(alive_R), dtype=np.int64)
    for level in range(1, num_levels + 1):
        rank_R = paths.ranks_RL[alive_R, level - 1].astype(np.int64)
        is_known_R = rank_R >= 0
        alive_R, node_R, rank_R = alive_R[is_known_R], node_R[is_known_R], rank_R[is_known_R]
        # Nodes of a level are numbered in the order of their paths, so keys sort by path too.
        keys, inverse_R, count = np.unique(
            node_R * paths.num_vocab + rank_R, return_inverse=True, return_counts=True
        )
        kept = np.sort(np.lexsort((np.arange(len(keys)), -count))[:max_nodes])
        new_index = np.full(len(keys), -1)
        new_index[kept] = np.arange(len(kept))
        levels.append(np.full(len(kept), level))
        parents.append(keys[kept] // paths.num_vocab)
        ranks.append(keys[kept] % paths.num_vocab)
        counts.append(count[kept])
        node_R = new_index[inverse_R]
        alive_R, node_R = alive_R[node_R >= 0], node_R[node_R >= 0]
    return _sorted_by_count(levels, parents, ranks, counts, len(paths.ranks_RL))


def _sorted_by_count(
    levels: list[IntArray],
    parents: list[IntArray],
    ranks: list[IntArray],
    counts: list[IntArray],
    num_roots: int,
) -> FrequentPaths:
    starts = np.cumsum([0, *(len(level) for level in levels)])
    # Parents as indexes into the concatenation: those of level d stand at the start of level d - 1.
    joined = [
        np.full(len(parent), -1) if i == 0 else parent + starts[i - 1]
        for i, parent in enumerate(parents)
    ]
    level_K, parent_K = np.concatenate(levels), np.concatenate(joined)
    rank_K, count_K = np.concatenate(ranks), np.concatenate(counts)
    order: npt.NDArray[np.intp] = np.lexsort((np.arange(len(level_K)), -count_K))
    new_index = np.full(len(order) + 1, -1)
    new_index[order] = np.arange(len(order))
    return FrequentPaths(
        level_K=level_K[order].astype(np.int64),
        rank_K=rank_K[order].astype(np.int64),
        parent_K=new_index[parent_K[order]].astype(np.int64),
        count_K=count_K[order].astype(np.int64),
        num_roots=num_roots,
    )
