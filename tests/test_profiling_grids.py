"""What is measured: all that the space needs, inside what the target has, and nothing else."""

import pytest
import torch

from dreams_nas.core.errors import UserError
from dreams_nas.decode.plan import build_tree_plan
from dreams_nas.profiling.grids import even_tree, likely_tree, plan_grids
from dreams_nas.space.arch import TargetDims
from dreams_nas.space.search_space import SearchSpace, load_search_space

DIMS = TargetDims(
    hidden=192, num_layers=8, num_heads=8, num_kv_heads=4, head_size=24, ffn=512, vocab=4096
)


@pytest.fixture(scope="module")
def demo(request: pytest.FixtureRequest) -> SearchSpace:
    return load_search_space(request.config.rootpath / "search_spaces" / "demo.yaml")


def test_the_demo_space_asks_for_its_own_sizes_alone(demo):
    grids = plan_grids(demo, DIMS, 1024)
    assert grids.layer_sizes == ((2, 256), (2, 512), (4, 256), (4, 512))
    assert grids.vocabs == (512, 1024, 2048, 4096)
    assert grids.taps == (1, 3)
    assert grids.depths == (1, 2)
    assert grids.verify_rows == (*range(2, 18), 33)
    assert grids.chain_rows == (2, 3, 4, 5, 6, 7, 8, 9)
    assert grids.sync_rows == (1, 2, 4, 7, 9)
    assert grids.chain_host_rows == (2, 4, 9)
    assert grids.host_rows == (2, 4, 9, 17, 33)
    assert grids.rest_rows == (1, 4, 16, 31)
    assert grids.step_rows[-1] == 31
    assert (grids.kv_points[0], grids.kv_points[-1]) == (1, 512)


def test_chains_need_no_wide_steps():
    space = SearchSpace(policy={"kind": "chain", "levels": [0, 5], "nodes": [1, 59]})
    grids = plan_grids(space, DIMS, 1024)
    assert grids.verify_rows[-1] == grids.chain_rows[-1] == 6
    assert grids.sync_rows[-1] == 6
    assert grids.step_rows == grids.rest_rows == (1,)


def test_equal_sizes_are_measured_once(demo):
    small = DIMS.replace(num_kv_heads=1, num_heads=2, vocab=4)
    grids = plan_grids(demo, small, 1024)
    assert grids.layer_sizes == ((1, 256), (1, 512))
    assert grids.vocabs == (1, 2, 4)


def test_sizes_beyond_the_positions_are_refused(demo):
    with pytest.raises(UserError, match=r"max_kv = 1000: with 33 rows .* --max-kv 991 or less"):
        plan_grids(demo, DIMS, 1024, max_kv=1000)
    with pytest.raises(UserError, match=r"max_q = 33: the target has 32 positions"):
        plan_grids(demo, DIMS, 32)
    assert plan_grids(demo, DIMS, 1024, max_kv=991, max_q=33).max_kv == 991
    assert plan_grids(demo, DIMS, 40_000).max_kv == 2048


@pytest.mark.parametrize(("levels", "nodes"), [(1, 8), (2, 3), (6, 32), (9, 59)])
def test_likely_trees_have_the_nodes_and_at_most_the_levels_asked_for(levels, nodes):
    tree = likely_tree(levels, nodes)
    assert tree.num_nodes == nodes
    assert tree.num_levels <= levels
    assert (0,) in tree.paths


def test_an_even_tree_has_equal_steps():
    tree = even_tree(5, 3, 4)
    assert tree.step_widths == (5, 5, 5)
    assert tree.num_nodes == 5 + 3 * (5 + 3)
    plan = build_tree_plan(tree, torch.device("cpu"), torch.float32)
    assert [level.num_ranks for level in plan.levels] == [5, 4, 4, 4]
    assert even_tree(5, 0).step_widths == ()
