"""Predicted rounds and speedups against arithmetic by hand."""

import numpy as np
import pytest
from fake_ranks import build_ranks
from fake_tables import DIMS, build_table

from dreams_nas.core.errors import UserError
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.predict import predict_round_ms, predict_speedup
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.rank_paths import RankPaths
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import walk

COSTS = CostModel(build_table(), DraftArch(), DIMS)
TREE = StaticTree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])  # w_2 = 2, w_3 = 1


def hand_paths() -> RankPaths:
    """Two prompts: rounds at roots 0, 3 (accepting 2, 1) and at roots 0, 1 (accepting 0, 1)."""
    first = [[0, 0, -1], [0, 0, 0], [0, 0, 0], [1, -1, -1], [-1, -1, -1]]
    second = [[5, 0, -1], [0, -1, -1], [-1, -1, -1]]
    ranks = [np.array(first), np.array(second)]
    return RankPaths.from_prompts(ranks, prompt_lengths=[100, 200], kept_rows=[50, 60], num_vocab=8)


def test_rounds_are_priced_one_by_one() -> None:
    steps = walk(hand_paths(), TREE)
    assert steps.root_N.tolist() == [0, 3, 0, 1]
    assert steps.accepted_N.tolist() == [2, 1, 0, 1]

    def base(target_kv: int, draft_kv: int) -> float:
        level2, level3 = COSTS.t_step(2, draft_kv), COSTS.t_step(1, draft_kv + 2)
        verify = COSTS.t_verify(6, target_kv, "tree")
        return float(level2 + level3 + COSTS.t_tree(6) + verify + COSTS.t_commit(6))

    expected = [
        base(100, 50),  # no sync in the first round
        base(103, 53) + float(COSTS.t_sync(3, 50)),  # two accepted and the bonus token
        base(200, 60),
        base(201, 61) + float(COSTS.t_sync(1, 60)),  # the bonus token alone
    ]
    np.testing.assert_allclose(predict_round_ms(COSTS, TREE, steps), expected, rtol=1e-12)


def test_speedup_of_a_prompt_is_plain_over_prefill_and_rounds() -> None:
    steps = walk(hand_paths(), TREE)
    prediction = predict_speedup(COSTS, TREE, steps)
    rounds = predict_round_ms(COSTS, TREE, steps)
    # Five and three tokens after the one from prefill, each at its own kv.
    plain = [
        sum(5 + 0.002 * kv for kv in range(100, 105)),
        sum(5 + 0.002 * k for k in (200, 201, 202)),
    ]
    spent = [
        float(COSTS.t_draft_prefill(50)) + rounds[0] + rounds[1],
        float(COSTS.t_draft_prefill(60)) + rounds[2] + rounds[3],
    ]
    np.testing.assert_allclose(prediction.plain_ms_P, plain)
    np.testing.assert_allclose(prediction.speculative_ms_P, spent)
    summary = prediction.summary
    ratios = [plain[0] / spent[0], plain[1] / spent[1]]
    assert summary.median == pytest.approx(sum(ratios) / 2)
    assert summary.ratio_of_sums == pytest.approx(sum(plain) / sum(spent))
    assert summary.p10 == pytest.approx(min(ratios) + 0.1 * abs(ratios[0] - ratios[1]))
    assert summary.quantiles() == {
        "median": summary.median,
        "p10": summary.p10,
        "p90": summary.p90,
    }


def test_a_chain_is_priced_as_a_chain() -> None:
    paths = hand_paths()
    chain = StaticTree.chain(3)
    steps = walk(paths, chain)
    first = predict_round_ms(COSTS, chain, steps)[0]
    expected = COSTS.t_verify(4, 100, "chain") + COSTS.t_tree(4) + COSTS.t_commit(4, "chain")
    assert COSTS.t_commit(4, "chain") < COSTS.t_commit(4, "tree")  # a prefix, nothing gathered
    expected = expected + COSTS.t_step(1, 50) + COSTS.t_step(1, 51)
    assert first == pytest.approx(float(expected))


def test_no_nodes_cost_plain_decoding() -> None:
    paths = build_ranks()
    prediction = predict_speedup(COSTS, StaticTree(), walk(paths, StaticTree()))
    summary = prediction.summary
    assert (summary.median, summary.p10, summary.p90, summary.ratio_of_sums) == (1, 1, 1, 1)
    assert prediction.round_ms_N.sum() == pytest.approx(prediction.plain_ms_P.sum())


def test_dropping_image_tokens_makes_rounds_cheaper_and_prefill_shorter() -> None:
    few, many = build_ranks(kept_rows=20), build_ranks(kept_rows=90)
    times = [
        predict_speedup(COSTS, TREE, walk(paths, TREE)).speculative_ms_P.sum()
        for paths in (few, many)
    ]
    assert times[0] < times[1]


def test_prompts_with_nothing_to_decode_are_left_out() -> None:
    empty = np.zeros((0, 3), dtype=np.int32)
    ranks = [empty, np.array([[0, -1, -1]])]
    paths = RankPaths.from_prompts(ranks, prompt_lengths=[9, 9], kept_rows=[9, 9], num_vocab=8)
    summary = predict_speedup(COSTS, TREE, walk(paths, TREE)).summary
    assert summary.num_prompts == 1
    with pytest.raises(UserError, match="none of 1 prompts has an answer of two tokens"):
        predict_speedup(COSTS, TREE, walk(paths.subset([0]), TREE))


def test_a_sequence_longer_than_measured_is_an_error_not_an_extrapolation() -> None:
    paths = build_ranks(prompt_length=1000)
    with pytest.raises(UserError, match=r"verify\(mask=tree\): kv = .* --max-kv"):
        predict_speedup(COSTS, TREE, walk(paths, TREE))
