"""Forced acceptance: the decoder's own rounds, of exactly the length asked for."""

import itertools

import numpy as np
import pytest
import torch
from target_models import build_target

from dreams_nas.decode.engine import build_plan, decode
from dreams_nas.profiling.forced import ForcedTarget, measure_rounds, path_rows
from dreams_nas.profiling.grids import likely_tree
from dreams_nas.profiling.metrics import error_report, kendall_tau
from dreams_nas.profiling.random_drafts import RandomDrafts
from dreams_nas.profiling.validation import accepted_schedule
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import TargetInputs


@pytest.fixture(scope="module")
def target():
    return build_target("llava")


@pytest.fixture(scope="module")
def drafts(target):
    return RandomDrafts(target, 0, 2)


@pytest.mark.parametrize("tree", [StaticTree.chain(4), likely_tree(4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_round_accepts_what_it_is_told_to(target, drafts, tree, depth):
    prompt = TargetInputs(drafts.tokens(20))
    accepted = [0, 1, tree.num_levels, 2, 0, 3]
    draft = drafts.ready(DraftArch(tap="last", depth=depth))
    found = measure_rounds(target, draft, tree, prompt, accepted)
    assert found.walk.accepted_N.tolist() == accepted
    assert found.walk.root_N.tolist() == [0, 1, 3, 4 + tree.num_levels, 7 + tree.num_levels,
                                          8 + tree.num_levels]  # fmt: skip
    assert (found.round_ms_N > 0).all()
    assert found.walk.prompt_lengths_P.tolist() == [20]


def test_forcing_leaves_the_target_as_it_was(target, drafts):
    prompt = TargetInputs(drafts.tokens(15))
    before = decode(target, prompt, max_new_tokens=6, stop_ids=()).tokens
    tree = StaticTree.chain(2)
    measure_rounds(target, drafts.ready(DraftArch(tap="last")), tree, prompt, [2, 0, 1])
    assert decode(target, prompt, max_new_tokens=6, stop_ids=()).tokens == before
    plan = build_plan(tree, target)
    assert ForcedTarget(target, plan, [0]).spec == target.spec


def test_paths_go_down_one_child_a_level(target):
    tree = likely_tree(5, 20)
    plan = build_plan(tree, target)
    for length in range(tree.num_levels + 1):
        rows = path_rows(plan, length)
        assert len(rows) == length + 1
        assert all(b in plan.children[a] for a, b in itertools.pairwise(rows))


def test_schedules_meet_every_number_of_accepted_nodes():
    assert set(accepted_schedule(StaticTree.chain(4), 7)) == {0, 1, 2, 3, 4}
    assert set(accepted_schedule(likely_tree(5, 30), 7)) == set(range(6))


def test_random_drafts_share_prefixes_and_differ_in_size(target, drafts):
    small = drafts.ready(DraftArch(tap="last", head_ratio=0.5, ffn_ratio=0.5, vocab=0.25))
    large = drafts.ready(DraftArch(tap="last", depth=2))
    assert len(small.weights.layers) == 1
    assert len(large.weights.layers) == 2
    assert torch.equal(large.weights.head_VD[: len(small.weights.head_VD)], small.weights.head_VD)
    assert torch.equal(small.weights.head_VD, target.head_weight_VD[small.vocab_ids_W])
    assert small.weights.layers[0].k.shape[0] * 2 == large.weights.layers[0].k.shape[0]
    assert small.weights.layers[0].gate.shape[0] * 2 == large.weights.layers[0].gate.shape[0]
    assert target.image_token_id not in drafts.tokens(2000)


def test_error_report_by_hand():
    report = error_report([10.9, 9.1, 24.0, 40.0], [10.0, 10.0, 20.0, 40.0], [1, 1, 2, 2])
    assert report["mape"] == pytest.approx((0.09 + 0.09 + 0.2 + 0.0) / 4)
    assert report["bias"] == pytest.approx((0.09 - 0.09 + 0.2) / 4)
    assert (report["hit_10"], report["hit_15"]) == (0.75, 0.75)
    assert report["kendall_tau_equal_depth"] == pytest.approx(1 / np.sqrt(2))
    assert report["num_cases"] == 4


def test_kendall_tau_of_orders_constants_and_groups():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([3, 2, 1], [10, 20, 30]) == -1
    assert kendall_tau([5, 5, 5], [10, 20, 30]) == 0
    assert kendall_tau([1, 2, 3, 4], [10, 20, 5, 6]) == pytest.approx(-1 / 3)
    assert kendall_tau([1, 2, 3, 4], [10, 20, 5, 6], [1, 1, 2, 2]) == 1
    assert kendall_tau([1, 2], [10, 20], [1, 2]) is None
