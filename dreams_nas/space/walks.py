"""Walks: which rounds a draft tree would take over recorded answers.

Shapes: P prompts, R roots, N rounds of all prompts one after the other, L levels.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dreams_nas.space.rank_paths import IntArray, RankPaths
from dreams_nas.space.tree import StaticTree


@dataclass(frozen=True)
class Walk:
    """The rounds of decoding, in order, prompt after prompt. Replayed, or recorded live."""

    prompt_N: IntArray
    """Prompt of each round, ascending."""
    root_N: IntArray
    """Answer token that is the last committed one when the round starts; 0 in the first."""
    accepted_N: IntArray
    """Drafted tokens accepted, the bonus token not counted."""
    answer_lengths_P: IntArray
    """Answer tokens of each prompt, the one from prefill included."""
    prompt_lengths_P: IntArray
    """Target rows of each prompt."""
    kept_rows_P: IntArray
    """Draft rows of each prompt after its prefill."""

    @property
    def num_rounds(self) -> int:
        """Verify rounds of all prompts."""
        return len(self.root_N)

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all prompts, those from prefill left out."""
        return int(np.maximum(self.answer_lengths_P - 1, 0).sum())

    @property
    def acceptance_length(self) -> float | None:
        """tau: generated tokens / verify rounds, sum over sum; None without a round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else None

    @cached_property
    def tokens_N(self) -> IntArray:
        """Tokens that each round yields: accepted and bonus, cut at the end of the answer."""
        left_N = self.answer_lengths_P[self.prompt_N] - 1 - self.root_N
        tokens_N: IntArray = np.minimum(self.accepted_N + 1, left_N)
        return tokens_N

    @cached_property
    def is_first_N(self) -> npt.NDArray[np.bool_]:
        """Whether the round is its prompt's first."""
        is_first_N: npt.NDArray[np.bool_] = self.root_N == 0
        return is_first_N

    def level_rates(self, num_levels: int) -> list[float]:
        """Share of rounds that accept level 1, 2, ..., `num_levels`."""
        if not self.num_rounds:
            return [0.0] * num_levels
        return [float((self.accepted_N >= d).mean()) for d in range(1, num_levels + 1)]


def accepted_levels(paths: RankPaths, tree: StaticTree) -> IntArray:
    """Levels that the tree would accept at every root, [R].

    Raises:
        AssertionError: The tree is deeper than the recorded levels.
    """
    assert tree.num_levels <= paths.num_levels, "the tree is deeper than the recorded rank paths"
    num_roots = len(paths.ranks_RL)
    accepted_R = np.zeros(num_roots, dtype=np.int64)
    if not tree.paths:
        return accepted_R
    child = _child_table(tree)
    alive_R = np.arange(num_roots)
    node_R = np.zeros(num_roots, dtype=np.int64)
    last_column = child.shape[1] - 1
    for level in range(tree.num_levels):
        rank_R = paths.ranks_RL[alive_R, level]
        # -1 and ranks that no node has both land in the last column, which holds no child.
        node_R = child[node_R, np.where(rank_R < 0, last_column, np.minimum(rank_R, last_column))]
        is_node_R = node_R > 0
        alive_R, node_R = alive_R[is_node_R], node_R[is_node_R]
        accepted_R[alive_R] += 1
    return accepted_R


def _child_table(tree: StaticTree) -> IntArray:
    """Node (1-based, 0 is the root) reached from a node by a rank; 0 where there is none."""
    num_ranks = 1 + max(path[-1] for path in tree.paths)
    child = np.zeros((tree.num_nodes + 1, num_ranks + 1), dtype=np.int64)
    for node, (path, parent) in enumerate(zip(tree.paths, tree.parents, strict=True), start=1):
        child[parent + 1, path[-1]] = node
    return child


def walk(paths: RankPaths, tree: StaticTree) -> Walk:
    """Walk the tree over the recorded answers: accept, jump behind the bonus token, repeat.

    A walk starts with token 0 committed and ends when the answer is complete. Without nodes every
    round yields one token, as plain decoding does.
    """
    jumps = (accepted_levels(paths, tree) + 1).tolist()
    rounds: list[int] = []
    ends = (paths.starts_P + paths.num_roots_P).tolist()
    for root, end in zip(paths.starts_P.tolist(), ends, strict=True):
        while root < end:
            rounds.append(root)
            root += jumps[root]
    rounds_N = np.array(rounds, dtype=np.int64)
    return Walk(
        prompt_N=paths.prompt_R[rounds_N],
        root_N=paths.offset_R[rounds_N],
        accepted_N=np.array([jumps[root] - 1 for root in rounds], dtype=np.int64),
        answer_lengths_P=paths.answer_lengths_P,
        prompt_lengths_P=paths.prompt_lengths_P,
        kept_rows_P=paths.kept_rows_P,
    )
