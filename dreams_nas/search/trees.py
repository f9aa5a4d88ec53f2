"""Choosing the draft tree of one draft: levels and nodes scanned together with the table's costs.

The static tree of n nodes that accepts most is the n most frequent rank paths. A draft step costs
by its width, though: few expanded nodes per level may be worth more than the last accepted token,
so the same is done for trees of at most 1, 2 and 4 expanded nodes per level. Each size is screened
by averages over all roots, which over-predict a walk by several percent but rank well; the best few
are walked and priced round by round.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dreams_nas.core.errors import UserError
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.grid import FloatArray
from dreams_nas.latency.predict import SpeedupSummary, predict_speedup
from dreams_nas.search.frequent_paths import FrequentPaths, count_paths
from dreams_nas.space.rank_paths import IntArray, RankPaths
from dreams_nas.space.search_space import PolicySpace
from dreams_nas.space.tree import RankPath, StaticTree
from dreams_nas.space.walks import walk

NUM_SCORED = 12
"""Trees that are walked after the screening. More of them fit the noise of the *choose* prompts."""

MAX_WIDTHS = (1, 2, 4, None)
"""Limits of w_d that are tried; None is no limit."""


@dataclass(frozen=True)
class TreeChoice:
    """The best policy found inside one draft."""

    tree: StaticTree
    """Its tree; without nodes: do not speculate."""
    speedup_predicted: SpeedupSummary
    """On the prompts that it was chosen on, so a little flattering; report another split's."""


class _Screened(NamedTuple):
    rate: float
    """Tokens per millisecond, by averages."""
    num_levels: int
    num_nodes: int
    family: int
    """Index into MAX_WIDTHS."""


def choose_tree(
    paths: RankPaths, costs: CostModel, policy: PolicySpace, num_scored: int = NUM_SCORED
) -> TreeChoice:
    """The tree with the highest predicted ratio of sums on these prompts.

    The largest number of rows that verify was measured with caps the nodes.

    Args:
        paths: Rank paths of the *choose* prompts.
        costs: The draft's costs.
        policy: Legal kinds and sizes; levels from 0 on allow the empty tree as the answer.
        num_scored: Trees that are walked.

    Raises:
        UserError: The policy asks for more levels than were recorded, for more nodes than were
            measured, or a cost lies outside the measured range.
    """
    max_nodes = _max_nodes(paths, costs, policy)
    if policy.kind == "chain":
        candidates = _chains(policy, max_nodes)
    else:
        candidates = _screened_trees(paths, costs, policy, max_nodes, num_scored)
    best: TreeChoice | None = None
    for tree in candidates:
        summary = predict_speedup(costs, tree, walk(paths, tree)).summary
        if best is None or _merit(tree, summary) > _merit(best.tree, best.speedup_predicted):
            best = TreeChoice(tree, summary)
    may_decline = policy.levels[0] == 0
    if best is None or (may_decline and best.speedup_predicted.ratio_of_sums <= 1.0):
        assert may_decline, "a policy that must speculate has at least one tree"
        none = StaticTree()
        return TreeChoice(none, predict_speedup(costs, none, walk(paths, none)).summary)
    return best


def best_tree_of_size(paths: RankPaths, num_levels: int, num_nodes: int) -> StaticTree:
    """The most frequent rank paths as a tree of exactly n nodes and at most L levels.

    Where fewer paths were observed, the lowest ranks of the shallowest levels fill up.

    Raises:
        UserError: More levels than were recorded, or more nodes than the vocabulary allows.
    """
    _require_levels(paths, num_levels)
    frequent = count_paths(paths, num_levels, num_nodes).up_to_level(num_levels, num_nodes)
    return _filled(frequent.paths(num_nodes), num_levels, num_nodes, paths.num_vocab)


def _merit(tree: StaticTree, summary: SpeedupSummary) -> tuple[float, int]:
    return summary.ratio_of_sums, -tree.num_nodes


def _require_levels(paths: RankPaths, num_levels: int) -> None:
    if num_levels > paths.num_levels:
        raise UserError(
            f"a tree of {num_levels} levels is asked for, but the replay recorded "
            f"{paths.num_levels}; replay with num_levels = {num_levels}, or lower policy.levels"
        )


def _max_nodes(paths: RankPaths, costs: CostModel, policy: PolicySpace) -> int:
    _require_levels(paths, policy.levels[1])
    measured = costs.max_verify_rows("chain" if policy.kind == "chain" else "tree") - 1
    least = max(policy.nodes[0], policy.levels[0])
    if least > measured:
        raise UserError(
            f"the policy has at least {least} nodes, but the latency table prices at most "
            f"{measured}; measure more with `dreams-nas profile --max-q {least + 1}`"
        )
    return min(policy.nodes[1], measured)


def _chains(policy: PolicySpace, max_nodes: int) -> list[StaticTree]:
    least = max(policy.levels[0], policy.nodes[0], 1)
    return [StaticTree.chain(k) for k in range(least, min(policy.levels[1], max_nodes) + 1)]


def _screened_trees(
    paths: RankPaths, costs: CostModel, policy: PolicySpace, max_nodes: int, num_scored: int
) -> list[StaticTree]:
    """The best tree of each number of levels, then the best of the rest."""
    counted = count_paths(paths, policy.levels[1], max_nodes)
    families = [counted if w is None else counted.up_to_width(w) for w in MAX_WIDTHS]
    average = _AverageCosts(paths, costs, max_nodes)
    best_by_level: list[_Screened] = []
    others: list[_Screened] = []
    for num_levels in range(max(policy.levels[0], 1), policy.levels[1] + 1):
        found: dict[tuple[float, int], _Screened] = {}  # equal trees of two families fall together
        for family, nodes in enumerate(families):
            screened = average.screen(nodes.up_to_level(num_levels, max_nodes), num_levels)
            for rate, num_nodes in screened:
                if num_nodes >= policy.nodes[0]:
                    one = _Screened(rate, num_levels, num_nodes, family)
                    found.setdefault((rate, num_nodes), one)
        ordered = sorted(found.values(), reverse=True)[:num_scored]
        best_by_level += ordered[:1]
        others += ordered[1:]
    ranked = [*sorted(best_by_level, reverse=True), *sorted(others, reverse=True)][:num_scored]
    trees = [
        families[one.family].up_to_level(one.num_levels, max_nodes).tree(one.num_nodes)
        for one in ranked
    ]
    if not trees and policy.levels[0] > 0:
        # Nothing that was observed is large enough, but the policy must speculate.
        least = StaticTree.chain(policy.levels[0]).paths
        num_nodes = max(policy.nodes[0], len(least))
        trees = [_filled(list(least), policy.levels[1], num_nodes, paths.num_vocab)]
    return trees


def _filled(nodes: list[RankPath], num_levels: int, num_nodes: int, num_vocab: int) -> StaticTree:
    """The tree of these nodes, filled up to n by the lowest ranks of the shallowest levels."""
    found = dict.fromkeys(nodes)
    level: list[RankPath] = [()]
    for _ in range(num_levels):
        # Whoever parents the next level is in the tree already, so it stays closed.
        for parent in level:
            for rank in range(min(num_vocab, num_nodes)):
                if len(found) >= num_nodes:
                    return StaticTree.from_paths(found)
                found.setdefault((*parent, rank))
        length = len(level[0]) + 1
        level = sorted(path for path in found if len(path) == length)
    if len(found) < num_nodes:
        raise UserError(
            f"a tree of {num_nodes} nodes and {num_levels} levels is asked for, but a vocabulary "
            f"of {num_vocab} allows {len(found)}; ask for fewer nodes"
        )
    return StaticTree.from_paths(found)


class _AverageCosts:
    """Costs at the mean kv of all roots, as arrays over rows, looked up once per draft."""

    def __init__(self, paths: RankPaths, costs: CostModel, max_nodes: int) -> None:
        self._costs = costs
        self._draft_kv = float(paths.draft_kv_R.mean()) if len(paths.ranks_RL) else 0.0
        target_kv = float(paths.target_kv_R.mean()) if len(paths.ranks_RL) else 0.0
        rows = np.arange(2, max_nodes + 2)

        def pass_ms(rows: IntArray, mask: str) -> FloatArray:
            host = costs.t_tree(rows, mask) + costs.t_commit(rows, mask)
            return costs.t_verify(rows, target_kv, mask) + host

        self._tree_ms = np.concatenate([[0.0], pass_ms(rows, "tree")])
        chain_rows = rows[rows <= costs.max_verify_rows("chain")]
        chain_ms = pass_ms(chain_rows, "chain")
        unmeasured = np.full(len(rows) - len(chain_rows), np.inf)
        self._chain_ms = np.concatenate([[0.0], chain_ms, unmeasured])
        widths = np.arange(1, min(costs.max_step_rows, max_nodes) + 1)
        self._step_ms = np.full(max_nodes + 1, np.inf)  # wider than measured: never chosen
        self._step_ms[0] = 0.0
        self._step_ms[widths] = costs.t_step(widths, self._draft_kv)

    def screen(self, nodes: FrequentPaths, num_levels: int) -> list[tuple[float, int]]:
        """Rate and n of the first n nodes, for every n whose tree has exactly that many levels."""
        if not len(nodes.level_K):
            return []
        num_nodes = np.arange(1, len(nodes.level_K) + 1)
        levels = np.maximum.accumulate(nodes.level_K)
        is_chain = levels == num_nodes
        accepted = np.cumsum(nodes.count_K) / nodes.num_roots
        round_ms = np.where(is_chain, self._chain_ms[num_nodes], self._tree_ms[num_nodes])
        for level in range(2, num_levels + 1):
            round_ms = round_ms + self._step_ms[_widths(nodes, level)]
        round_ms = round_ms + self._sync_ms(1.0 + accepted)
        legal = np.flatnonzero((levels == num_levels) & np.isfinite(round_ms))
        rates = (1.0 + accepted[legal]) / round_ms[legal]
        return list(zip(rates.tolist(), num_nodes[legal].tolist(), strict=True))

    def _sync_ms(self, num_rows: FloatArray) -> FloatArray:
        return self._costs.t_sync(num_rows, np.maximum(self._draft_kv - num_rows, 0.0))


def _widths(nodes: FrequentPaths, level: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """w_d for the first n nodes, for every n: nodes of level d - 1 that have a child by then."""
    parents, first_child = np.unique(
        np.where(nodes.level_K == level, nodes.parent_K, -1), return_index=True
    )
    is_first_child = np.zeros(len(nodes.level_K), dtype=np.int64)
    is_first_child[first_child[parents >= 0]] = 1
    return np.cumsum(is_first_child)
