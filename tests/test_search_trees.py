"""Tree choice against brute force over all trees."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from fake_ranks import build_ranks
from fake_tables import DIMS, build_table

from dreams_nas.core.errors import UserError
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.predict import predict_speedup
from dreams_nas.search.frequent_paths import count_paths
from dreams_nas.search.trees import best_tree_of_size, choose_tree
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.rank_paths import RankPaths
from dreams_nas.space.search_space import PolicySpace
from dreams_nas.space.tree import RankPath, StaticTree
from dreams_nas.space.walks import accepted_levels, walk

ARCH = DraftArch()
COSTS = CostModel(build_table(), ARCH, DIMS)


def all_trees(num_levels: int, num_ranks: int, max_nodes: int) -> Iterator[frozenset[RankPath]]:
    """Every tree with up to that many levels, children per node, and nodes."""
    seen: set[frozenset[RankPath]] = {frozenset()}
    frontier = [frozenset[RankPath]()]
    while frontier:
        yield from frontier
        grown = {
            tree | {(*parent, rank)}
            for tree in frontier
            if len(tree) < max_nodes
            for parent in [(), *tree]
            if len(parent) < num_levels
            for rank in range(num_ranks)
        }
        frontier = sorted(grown - seen, key=sorted)
        seen |= grown


def slow_counts(paths: RankPaths, num_levels: int) -> Counter[RankPath]:
    counts: Counter[RankPath] = Counter()
    for row in paths.ranks_RL.tolist():
        for level in range(1, num_levels + 1):
            if row[level - 1] < 0:
                break
            counts[tuple(row[:level])] += 1
    return counts


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("num_levels", "max_nodes"), [(3, 5), (6, 32), (2, 59)])
def test_frequent_paths_equal_a_plain_count(seed: int, num_levels: int, max_nodes: int) -> None:
    paths = build_ranks(0.5, seed=seed)
    counts = slow_counts(paths, num_levels)
    expected = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:max_nodes]
    frequent = count_paths(paths, num_levels, max_nodes)
    assert frequent.paths(max_nodes) == expected
    assert frequent.count_K[:max_nodes].tolist() == [counts[path] for path in expected]
    shallow = frequent.up_to_level(2, max_nodes)
    ordered = sorted(
        (p for p in counts if len(p) <= 2), key=lambda path: (-counts[path], len(path), path)
    )
    assert shallow.paths(max_nodes) == ordered[:max_nodes]


@pytest.mark.parametrize("max_width", [1, 2])
def test_narrow_families_bound_the_step_widths(max_width: int) -> None:
    frequent = count_paths(build_ranks(0.5), 5, 20)
    narrow = frequent.up_to_width(max_width).up_to_level(5, 20)
    wide = frequent.up_to_level(5, 20)
    assert max(narrow.tree(20).step_widths) == max_width < max(wide.tree(20).step_widths)
    assert narrow.count_K.sum() < wide.count_K.sum()


def test_wide_steps_that_cost_too_much_are_avoided() -> None:
    """After a wrong first guess the second level is as good; expanding both costs a wide step."""
    paths = build_ranks(0.5, num_prompts=60)
    table = build_table(draft_scale=0.3)
    dear = [
        entry.replace(median_ms=5.0, p90_ms=5.0)
        if entry.block == "draft_head" and entry.q > 1
        else entry
        for entry in table.entries
    ]
    policy = PolicySpace(levels=(3, 3), nodes=(6, 20))
    trees = [
        choose_tree(paths, CostModel(one, ARCH, DIMS), policy).tree
        for one in (table, table.replace(entries=tuple(dear)))
    ]
    assert max(trees[0].step_widths) > 1
    assert trees[1].step_widths == (1, 1)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_tree_of_the_size_accepts_more(num_nodes: int, seed: int) -> None:
    paths = build_ranks(0.45, seed=seed, num_prompts=6, num_vocab=3, num_levels=3)
    best = best_tree_of_size(paths, 3, num_nodes)
    assert best.num_nodes == num_nodes
    accepted = max(
        int(accepted_levels(paths, StaticTree.from_paths(tree)).sum())
        for tree in all_trees(3, 3, num_nodes)
    )
    assert int(accepted_levels(paths, best).sum()) == accepted


def test_levels_depend_on_each_other_so_counts_beat_products_of_marginals() -> None:
    # After rank 1 the next is always 0, after rank 0 it is always 1: marginals are all one half.
    ranks = np.array([[0, 1], [1, 0]] * 4)
    paths = RankPaths.from_prompts([ranks], prompt_lengths=[9], kept_rows=[9], num_vocab=4)
    assert set(best_tree_of_size(paths, 2, 4).paths) == {(0,), (1,), (0, 1), (1, 0)}


def test_ties_go_to_the_shorter_then_the_lower_path() -> None:
    ranks = np.array([[2, 0], [1, 0], [3, 3]])
    paths = RankPaths.from_prompts([ranks], prompt_lengths=[9], kept_rows=[9], num_vocab=4)
    assert set(best_tree_of_size(paths, 2, 2).paths) == {(1,), (2,)}
    assert set(best_tree_of_size(paths, 2, 4).paths) == {(1,), (2,), (3,), (1, 0)}


def test_a_published_size_is_reached_even_where_few_paths_were_seen() -> None:
    ranks = np.array([[0, 0, 0]])
    paths = RankPaths.from_prompts([ranks], prompt_lengths=[9], kept_rows=[9], num_vocab=3)
    tree = best_tree_of_size(paths, 3, 5)
    assert set(tree.paths) == {(0,), (0, 0), (0, 0, 0), (1,), (2,)}
    # Level 1 is full with the vocabulary of 3; level 2 goes on from its lowest ranks.
    assert {(0, 1), (0, 2)} < set(best_tree_of_size(paths, 3, 7).paths)
    with pytest.raises(UserError, match="vocabulary of 3 allows 39"):
        best_tree_of_size(paths, 3, 40)
    with pytest.raises(UserError, match="tree of 4 levels is asked for, but the replay recorded 3"):
        best_tree_of_size(paths, 4, 5)


def brute_force(paths: RankPaths, costs: CostModel, max_nodes: int) -> tuple[float, StaticTree]:
    best = (1.0, StaticTree())
    for nodes in all_trees(3, 2, max_nodes):
        tree = StaticTree.from_paths(nodes)
        ratio = predict_speedup(costs, tree, walk(paths, tree)).summary.ratio_of_sums
        if ratio > best[0]:
            best = (ratio, tree)
    return best


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("draft_scale", [0.3, 1.0, 3.0])
def test_choice_is_close_to_the_best_of_all_trees(seed: int, draft_scale: float) -> None:
    """Over all 3-level binary trees of up to 4 nodes; the walk of the optimum may be lucky."""
    paths = build_ranks(0.55, seed=seed, num_prompts=40, num_levels=3)
    costs = CostModel(build_table(draft_scale=draft_scale), ARCH, DIMS)
    ratio, tree = brute_force(paths, costs, 4)
    choice = choose_tree(paths, costs, PolicySpace(levels=(0, 3), nodes=(1, 4)))
    found = choice.speedup_predicted.ratio_of_sums
    assert found >= 0.985 * ratio, (choice.tree.paths, tree.paths)
    expected = predict_speedup(costs, choice.tree, walk(paths, choice.tree)).summary
    assert choice.speedup_predicted == expected


def test_size_follows_the_costs() -> None:
    paths = build_ranks(0.7, num_prompts=60)
    policy = PolicySpace(levels=(0, 6), nodes=(1, 32))
    trees = [
        choose_tree(paths, CostModel(build_table(draft_scale=scale), ARCH, DIMS), policy).tree
        for scale in (0.1, 3.0)
    ]
    assert trees[0].num_levels > trees[1].num_levels > 0


def test_where_drafting_never_pays_the_answer_is_not_to_speculate() -> None:
    costs = CostModel(build_table(draft_scale=100.0), ARCH, DIMS)
    paths = build_ranks(0.7)
    for kind in ("static_tree", "chain"):
        choice = choose_tree(paths, costs, PolicySpace(kind=kind, levels=(0, 6)))
        assert choice.tree == StaticTree()
        assert choice.speedup_predicted.ratio_of_sums == 1.0
    forced = choose_tree(paths, costs, PolicySpace(levels=(2, 6), nodes=(3, 9)))
    assert forced.tree.num_levels >= 2
    assert forced.tree.num_nodes >= 3
    assert forced.speedup_predicted.ratio_of_sums < 1.0


def test_a_draft_that_never_guesses_right() -> None:
    ranks = [np.full((9, 3), -1)] * 2
    paths = RankPaths.from_prompts(ranks, prompt_lengths=[9, 9], kept_rows=[9, 9], num_vocab=4)
    assert choose_tree(paths, COSTS, PolicySpace(levels=(0, 3))).tree == StaticTree()
    forced = choose_tree(paths, COSTS, PolicySpace(levels=(2, 3), nodes=(4, 9))).tree
    assert forced.paths == ((0,), (1,), (2,), (0, 0))


def test_ranges_of_the_policy_hold() -> None:
    paths = build_ranks(0.7)
    for levels, nodes in [((1, 1), (4, 4)), ((3, 4), (8, 9)), ((0, 6), (1, 2))]:
        tree = choose_tree(paths, COSTS, PolicySpace(levels=levels, nodes=nodes)).tree
        assert levels[0] <= tree.num_levels <= levels[1]
        assert nodes[0] <= tree.num_nodes <= nodes[1]


def test_chains_only() -> None:
    paths = build_ranks(0.8, num_prompts=60)
    choice = choose_tree(paths, COSTS, PolicySpace(kind="chain", levels=(0, 6), nodes=(1, 9)))
    assert choice.tree.is_chain
    ratios = [
        predict_speedup(COSTS, tree, walk(paths, tree)).summary.ratio_of_sums
        for tree in map(StaticTree.chain, range(1, 7))
    ]
    assert choice.speedup_predicted.ratio_of_sums == max(ratios)
    assert choice.tree.num_levels == 1 + int(np.argmax(ratios))


def test_the_measured_rows_cap_the_nodes() -> None:
    paths = build_ranks(0.5, num_prompts=60)
    cheap = CostModel(build_table(draft_scale=0.01, qs=(1, 2, 3, 4, 5)), ARCH, DIMS)
    tree = choose_tree(paths, cheap, PolicySpace(levels=(0, 6), nodes=(1, 32))).tree
    assert 0 < tree.num_nodes <= 4
    with pytest.raises(UserError, match=r"at least 8 nodes, .* at most 4; .*profile --max-q 9"):
        choose_tree(paths, cheap, PolicySpace(levels=(0, 6), nodes=(8, 32)))


def test_more_levels_than_were_recorded_are_refused() -> None:
    with pytest.raises(UserError, match="tree of 9 levels is asked for, but the replay recorded 6"):
        choose_tree(build_ranks(), COSTS, PolicySpace(levels=(0, 9)))


def test_a_dozen_walked_trees_are_enough_on_prompts_that_were_not_chosen_on() -> None:
    """Walking more trees gains on the *choose* prompts only: with few of them it fits their noise.

    Seen over 10 seeds: with 30 prompts 200 trees look up to 1.1 % better where they were chosen,
    and are 0.3 % worse on others. So the bar is on held-out prompts, where it means something.
    """
    policy = PolicySpace(levels=(0, 6), nodes=(1, 32))
    paths = build_ranks(0.6, num_prompts=30)
    held_out = build_ranks(0.6, seed=900, num_prompts=150)
    choices = [choose_tree(paths, COSTS, policy, num_scored) for num_scored in (1, 12, 200)]
    chosen_on = [choice.speedup_predicted.ratio_of_sums for choice in choices]
    assert chosen_on[0] <= chosen_on[1] <= chosen_on[2]
    elsewhere = [
        predict_speedup(COSTS, choice.tree, walk(held_out, choice.tree)).summary.ratio_of_sums
        for choice in choices
    ]
    assert elsewhere[1] >= 0.99 * elsewhere[2]
