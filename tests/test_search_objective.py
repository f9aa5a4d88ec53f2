"""The whole table-driven search on fake replays: planted optima, and a table where nothing pays."""

import pytest
from fake_objective import IDENTITY
from fake_ranks import build_ranks
from fake_tables import DIMS, build_table

from dreams_nas.latency.cost import CostModel
from dreams_nas.search.objective import Evaluation, SplitRankPaths, TableObjective, score_tree
from dreams_nas.search.pareto import pareto_front
from dreams_nas.search.searchers import ExhaustiveSearcher, Problem
from dreams_nas.search.study import Study
from dreams_nas.search.trees import choose_tree
from dreams_nas.search.winner import choose_winner, decompose_lift
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import PolicySpace, SearchSpace

SPACE = SearchSpace(
    tap=("last", "three"),
    depth=(1, 2),
    keep_ratio=(0.25, 1.0),
    vocab=(0.25, 1.0),
    policy=PolicySpace(levels=(0, 5), nodes=(1, 16)),
)
BETTER = {"tap": "three", "vocab": 0.25}
"""Choices that guess better; depth and kept image tokens do not help, so they only cost."""


def replay(arch: DraftArch) -> SplitRankPaths:
    hits = sum(getattr(arch, name) == value for name, value in BETTER.items())
    kept_rows = 20 + round(64 * arch.keep_ratio)
    choose, score = (
        build_ranks(0.5 + 0.1 * hits, seed=seed, num_prompts=15, kept_rows=kept_rows)
        for seed in (1, 2)
    )
    return SplitRankPaths(choose, score)


def search(draft_scale: float) -> tuple[list[Evaluation], TableObjective]:
    table = build_table(SPACE, draft_scale=draft_scale)
    objective = TableObjective(table, DIMS, SPACE.policy, replay)
    found = ExhaustiveSearcher().search(Problem(SPACE, DIMS, objective), Study(IDENTITY))
    return found, objective


def test_the_search_finds_the_planted_winner_and_explains_it() -> None:
    found, objective = search(draft_scale=1.0)
    assert len(found) == SPACE.size
    choice = choose_winner(found, lambda finalists: [e.speedup for e in finalists])
    planted = DraftArch(tap="three", depth=1, keep_ratio=0.25, vocab=0.25)
    assert choice.winner is not None
    assert choice.winner.arch == planted
    assert choice.winner.speedup == max(e.speedup for e in found) > 1.2
    assert choice.winner in pareto_front(found)

    def chain(arch: DraftArch) -> Evaluation:
        return objective.evaluate(arch, PolicySpace(kind="chain", levels=(0, 5)))

    known = {e.arch.key: e for e in found}
    rows = decompose_lift(choice.winner, SPACE, DIMS, objective, evaluate_chain=chain, known=known)
    by_name = {row.dimension: row for row in rows}
    # tap and depth are eagle3's own, so nothing is changed back there.
    assert list(by_name) == ["tree", "keep_ratio", "vocab"]
    assert (by_name["vocab"].winner, by_name["vocab"].baseline) == (0.25, 1.0)
    assert by_name["vocab"].lift > by_name["keep_ratio"].lift > 1.0
    full = known[planted.replace(vocab=1.0).key]
    assert by_name["vocab"].lift == choice.winner.speedup / full.speedup


def test_where_drafting_never_pays_there_is_no_winner_and_nothing_is_decoded() -> None:
    found, _ = search(draft_scale=100.0)
    assert {e.speedup for e in found} == {1.0}
    assert not any(e.speculates for e in found)
    assert {e.acceptance_length for e in found} == {1.0}
    assert pareto_front(found) == []

    def never(finalists: list[Evaluation]) -> list[float]:
        raise AssertionError("no finalist to decode")

    choice = choose_winner(found, never)
    assert choice.winner is None
    assert choice.finalists == ()


def test_trees_are_chosen_on_one_split_and_scored_on_the_other() -> None:
    table = build_table(SPACE)
    arch = DraftArch(vocab=0.25)
    objective = TableObjective(table, DIMS, SPACE.policy, replay)
    result = objective(arch)
    paths = replay(arch)
    costs = CostModel(table, arch, DIMS)
    assert result.tree == choose_tree(paths.choose, costs, SPACE.policy).tree
    assert result == score_tree(costs, arch, result.tree, paths.score, DIMS)
    assert result != score_tree(costs, arch, result.tree, paths.choose, DIMS)
    assert result.draft_prefill_ms == pytest.approx(
        float(costs.t_draft_prefill(paths.score.kept_rows_P).mean())
    )


def test_a_longer_tau_can_be_a_slower_draft() -> None:
    table = build_table(SPACE)
    costs = CostModel(table, DraftArch(), DIMS)
    paths = build_ranks(0.5, num_prompts=40)
    small = choose_tree(paths, costs, PolicySpace(levels=(1, 3), nodes=(1, 8))).tree
    large = choose_tree(paths, costs, PolicySpace(levels=(6, 6), nodes=(50, 59))).tree
    few, many = (score_tree(costs, DraftArch(), tree, paths, DIMS) for tree in (small, large))
    assert many.acceptance_length > few.acceptance_length
    assert many.speedup < few.speedup
