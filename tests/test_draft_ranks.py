"""Equal logits: drafting takes them in the order in which replay counts ranks."""

from dataclasses import replace

import pytest
import torch
from draft_models import build_ready
from target_models import build_target

from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.engine import build_plan
from dreams_nas.draft.layers import head
from dreams_nas.draft.ranks import best_rows
from dreams_nas.replay.batched import count_above
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree

HALF = (torch.bfloat16, torch.float16)


def replayed_ranks(logits_WV: torch.Tensor, rows_WK: torch.Tensor) -> list[list[int]]:
    size = logits_WV.shape[1]
    ranks = [count_above(logits_WV, rows_W, (size,))[:, 0] for rows_W in rows_WK.unbind(1)]
    return torch.stack(ranks, dim=1).tolist()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_the_order_of_drafting_equals_the_ranks_of_replay(
    dtype: torch.dtype, num_ranks: int
) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    rows = [
        torch.zeros(600),
        torch.full((600,), -2.5),
        torch.tensor([0.0, -0.0] * 300),
        torch.tensor([-0.0, 0.0] * 300),
        torch.tensor([-1.0, -3.0, -1.0, 2.0, 2.0, 0.0] * 100),
        torch.randint(-3, 3, (600,), generator=generator).float(),
        torch.randn(600, generator=generator),
        torch.arange(600.0).div(600).flip(0),
    ]
    logits_WV = torch.stack(rows).to(dtype)
    best_WK = best_rows(logits_WV, num_ranks).view(len(rows), num_ranks)
    expected = logits_WV.argsort(dim=-1, descending=True, stable=True)[:, :num_ranks]
    assert torch.equal(best_WK, expected)
    assert replayed_ranks(logits_WV, best_WK) == [list(range(num_ranks))] * len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_different_logits_come_out_sorted(dtype: torch.dtype) -> None:
    values = torch.tensor([3.0, -1.0, 65504.0, 0.0, -65504.0, 1e-7, -1e-7, float("-inf")])
    assert best_rows(values[None].to(dtype), 8).tolist() == [2, 0, 5, 3, 6, 1, 4, 7]


@torch.inference_mode()
def test_a_session_drafts_equal_guesses_in_the_order_of_replay() -> None:
    """A head of equal rows: the root's guesses are head rows 0, 1, 2 ..."""
    target = build_target("llama", dtype=torch.bfloat16)
    draft = build_ready(target, DraftArch(tap="last"))
    alike = draft.weights.head_VD[:1].expand_as(draft.weights.head_VD).contiguous()
    ids_V = torch.arange(len(alike)).flip(0)
    draft = replace(draft, weights=draft.weights._replace(head_VD=alike), vocab_ids_W=ids_V)
    plan = build_plan(StaticTree.from_paths([(r,) for r in range(6)]), target)
    assert plan is not None
    session = DraftSession(draft, target, plan, 4)
    features_AF = torch.randn(3, draft.weights.fc.shape[1], dtype=torch.bfloat16)
    session.sync(torch.tensor([5, 6, 7]), features_AF)
    drafted = session.propose(plan)
    assert drafted.tolist() == ids_V[:6].tolist()
    logits_1V = head(draft.weights, torch.ones(1, alike.shape[1], dtype=torch.bfloat16))
    assert replayed_ranks(logits_1V, torch.arange(6)[None]) == [list(range(6))]
