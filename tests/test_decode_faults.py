"""Faults planted into decoding: the matrix of losslessness must catch each of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import test_decode_matrix as matrix
from torch import Tensor

from dreams_nas.decode import engine, rounds
from dreams_nas.decode.adaptive import VerifyTensors
from dreams_nas.decode.plan import build_tree_plan
from dreams_nas.targets.cache import PreallocatedCache
from dreams_nas.targets.huggingface import HuggingFaceTarget

BRANCHING = ("bushy", "dynamic", "adaptive")


def require_caught(policy: str) -> None:
    with pytest.raises(AssertionError, match="DraftArch"):
        matrix.compare("last", policy)


def compute_plain_answers() -> None:
    for num_images in range(3):
        matrix._plain(2, num_images)


@pytest.mark.parametrize("policy", matrix.POLICIES)
def test_a_position_off_by_one_is_caught(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_plain_answers()
    right = HuggingFaceTarget._positions

    def wrong(self: Any, depths_Q: Tensor, cache: PreallocatedCache) -> Tensor:
        return right(self, depths_Q + (depths_Q > 0), cache)

    monkeypatch.setattr(HuggingFaceTarget, "_positions", wrong)
    require_caught(policy)


def _seeing_one_more(mask_QQ: Tensor | None) -> Tensor | None:
    """Every row sees the row after it, too."""
    if mask_QQ is None:
        return None
    mask_QQ = mask_QQ.clone()
    mask_QQ.diagonal(1).zero_()
    return mask_QQ


@pytest.mark.parametrize("policy", matrix.POLICIES)
def test_a_mask_off_by_one_is_caught(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_plain_answers()

    def wrong_plan(*arguments: Any) -> Any:
        plan = build_tree_plan(*arguments)
        return replace(plan, mask_QQ=_seeing_one_more(plan.mask_QQ))

    right_mask, right_of = rounds.Grown._mask, VerifyTensors.of

    def wrong_of(self: Any, tree: Any) -> tuple[Tensor, Tensor | None]:
        depths_Q, mask_QQ = right_of(self, tree)
        return depths_Q, _seeing_one_more(mask_QQ)

    monkeypatch.setattr(engine, "build_tree_plan", wrong_plan)
    monkeypatch.setattr(rounds.Grown, "_mask", lambda *a: _seeing_one_more(right_mask(*a)))
    monkeypatch.setattr(VerifyTensors, "of", wrong_of)
    require_caught(policy)


@pytest.mark.parametrize("policy", BRANCHING)
def test_a_wrong_row_kept_is_caught(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted path's rows are counted, but those at the front are kept."""
    compute_plain_answers()
    monkeypatch.setattr(PreallocatedCache, "_move", lambda *_: None)
    require_caught(policy)


def test_one_row_too_few_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_plain_answers()
    right = PreallocatedCache.commit

    def wrong(self: PreallocatedCache, rows: Sequence[int]) -> None:
        right(self, rows[:-1] if 1 < len(rows) < 6 else rows)

    monkeypatch.setattr(PreallocatedCache, "commit", wrong)
    require_caught("chain")


def test_a_token_of_the_wrong_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_plain_answers()

    def wrong(children: Any, drafted: Any, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
        rows, tokens = right(children, drafted, chosen)
        return rows, [*tokens[:-1], chosen[max(0, rows[-1] - 1)]]

    right = rounds.accept_greedy
    monkeypatch.setattr(rounds, "accept_greedy", wrong)
    require_caught("chain")


@pytest.mark.parametrize("policy", matrix.POLICIES)
def test_without_a_fault_nothing_is_caught(policy: str) -> None:
    """The same call, so that what the others catch is their fault."""
    matrix.compare("last", policy)
