"""What costs and probabilities decide: how much is drafted, and what is verified."""

import math
from dataclasses import replace

import pytest
import torch
from adaptive_rules import calibration, costs
from draft_models import TREES

from dreams_nas.decode.adaptive import AdaptivePlan, Economist, HostTree, VerifyTensors
from dreams_nas.decode.plan import build_tree_plan
from dreams_nas.space.policy import DynamicTree, LevelCalibration


def _round(economist: Economist, levels: list[list[float]]) -> tuple[int, HostTree]:
    """Levels that are drafted and the tree that is kept, with these guesses of every row."""
    economist.open_round()
    num_rows = 1
    for number, level in enumerate(levels, 1):  # noqa: B007
        logs = [math.log(p) for p in level]
        fed, rows = economist.look([list(range(len(logs)))] * num_rows, [logs] * num_rows)
        assert rows == [place // len(logs) for place in fed]
        num_rows = len(fed)
        if not fed:
            break
    return number, economist.harvest()


@pytest.mark.parametrize(
    ("step_ms", "row_ms", "levels", "nodes"),
    [(0.01, 0.0, 4, 12), (50.0, 0.0, 1, 2), (0.01, 50.0, 1, 0), (0.2, 0.1, 4, None)],
)
def test_costs_decide_how_much_is_drafted_and_kept(
    step_ms: float, row_ms: float, levels: int, nodes: int | None
) -> None:
    tree = DynamicTree(num_levels=4, width=2, num_nodes=14)
    economist = Economist(AdaptivePlan(calibration(tree), costs(step_ms, row_ms)))
    num_levels, kept = _round(economist, [[0.8, 0.15]] * 4)
    assert num_levels == levels
    if nodes is None:
        assert 0 < len(kept.tokens) < 14
    else:
        assert len(kept.tokens) == nodes


def test_a_higher_rate_makes_time_dearer() -> None:
    tree = DynamicTree(num_levels=4, width=2, num_nodes=14)
    kept = []
    for tokens in (1, 8):
        economist = Economist(AdaptivePlan(calibration(tree), costs(0.2, 0.25)))
        for _ in range(50):
            _round(economist, [[0.8, 0.15]] * 4)
            economist.observe(tokens)
        kept.append(len(_round(economist, [[0.8, 0.15]] * 4)[1].tokens))
    assert kept[1] < kept[0]


def test_grown_trees_are_verified_as_static_ones_are() -> None:
    device = torch.device("cpu")
    tensors = VerifyTensors(20, torch.float32, device)
    for tree in TREES.values():
        plan = build_tree_plan(tree, device, torch.float32)
        grown = HostTree([0] * tree.num_nodes, [parent + 1 for parent in tree.parents])
        depths_Q, mask_QQ = tensors.of(grown)
        assert grown.is_chain == tree.is_chain
        assert mask_QQ is not None
        assert plan.mask_QQ is not None
        torch.testing.assert_close(mask_QQ, plan.mask_QQ)
        assert depths_Q.tolist() == plan.depths_Q.tolist()
    depths_Q, mask_QQ = tensors.of(HostTree())
    assert depths_Q.tolist() == [0]
    assert mask_QQ is None


def test_deciding_has_a_price() -> None:
    tree = DynamicTree(num_levels=8, width=2, num_nodes=14)
    levels = []
    for decide_ms in (0.0, 5.0):
        priced = replace(costs(0.2, 0.05), decide_ms=decide_ms)
        economist = Economist(AdaptivePlan(calibration(tree), priced))
        levels.append(_round(economist, [[0.8, 0.15]] * 8)[0])
    assert levels[1] < levels[0]


def test_hopeless_guesses_are_dropped_and_the_rest_keep_their_places() -> None:
    tree = DynamicTree(num_levels=3, width=3, num_nodes=9)
    economist = Economist(AdaptivePlan(calibration(tree), costs(0.01, 0.0)))
    economist.open_round()
    fed, rows = economist.look([[7, 8, 9]], [[math.log(p) for p in (0.6, 0.3, 0.001)]])
    assert (fed, rows) == ([0, 1], [0, 0])
    second = [[math.log(p) for p in row] for row in ((0.9, 0.01, 0.01), (0.9, 0.09, 0.001))]
    fed, rows = economist.look([[1, 2, 3], [4, 5, 6]], second)
    assert (fed, rows) == ([0, 3, 4], [0, 1, 1])
    kept = economist.harvest()
    assert kept.tokens == [7, 8, 1, 4, 5]
    assert kept.parents == [0, 0, 1, 2, 2]
    assert kept.scores[-1] == pytest.approx(math.log(0.3 * 0.09))


def test_a_chain_is_kept_where_trees_are_dearer() -> None:
    tree = DynamicTree(num_levels=4, width=2, num_nodes=14)
    cheap = costs(0.01, 0.02)
    dear = replace(cheap, tree_ms=cheap.tree_ms + 4.0)
    branching, chain = (
        _round(Economist(AdaptivePlan(calibration(tree), c)), [[0.8, 0.15]] * 4)[1]
        for c in (cheap, dear)
    )
    assert not branching.is_chain
    assert chain.is_chain
    assert len(chain.tokens) == 4
    assert chain.mask(-9) == [[0 if i <= row else -9 for i in range(5)] for row in range(5)]
    assert branching.depths()[1:] == [branching.depths()[p] + 1 for p in branching.parents]


def test_a_child_never_counts_more_than_its_parent() -> None:
    """Levels are fitted apart, so the second one's map may promise more than the first one's."""
    tree = DynamicTree(num_levels=2, width=2, num_nodes=3)
    low = LevelCalibration(log_probabilities=(-9.0, 0.0), acceptance=(0.1, 0.2), continuation=1.0)
    high = low.replace(acceptance=(0.9, 1.0))
    fitted = calibration(tree).replace(levels=(low, high))
    _, kept = _round(Economist(AdaptivePlan(fitted, costs(0.0, 0.0))), [[0.6, 0.3]] * 2)
    assert kept.parents[0] == 0
    assert all(parent <= node for node, parent in enumerate(kept.parents))
