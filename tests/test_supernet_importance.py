"""Importance order: function-preserving, idempotent, and what matters ends first."""

from collections.abc import Iterator

import pytest
import torch
from recordings import made_up_recording, shake

from dreams_nas.core.errors import UserError
from dreams_nas.draft.layers import head
from dreams_nas.draft.unroll import unroll
from dreams_nas.replay.batches import AnswerBatch, build_batch
from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.supernet.importance import LayerOrder, apply_order, measure_importance
from dreams_nas.supernet.supernet import Supernet

HIDDEN, VOCAB, HEADS, GROUPS, HEAD_SIZE, FFN = 16, 30, 8, 4, 4, 12
FULL = DraftArch(tap="last", depth=2)


@pytest.fixture
def supernet() -> Supernet:
    dims = TargetDims(
        hidden=HIDDEN,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=GROUPS,
        head_size=HEAD_SIZE,
        ffn=FFN,
        vocab=VOCAB,
    )
    net = Supernet(
        dims,
        tap_layer_ids=(1,),
        depth=2,
        inv_freq=torch.tensor([1.0, 0.1]),
        eps=1e-5,
        head_weight_VD=torch.randn(VOCAB, HIDDEN),
        vocab_order_V=torch.arange(VOCAB),
    ).double()
    shake(net.body)
    return net


EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2)).double()


def embed(tokens: torch.Tensor) -> torch.Tensor:
    return EMBEDDING[tokens]


def batch(seed: int) -> AnswerBatch:
    recording = made_up_recording([5, 6, 7, 8, 9], prompt=[1, 2, 3], hidden=HIDDEN, seed=seed)
    return build_batch([recording], (1,), 1.0, embed, dtype=torch.float64)


def logits(net: Supernet, seed: int = 0, arch: DraftArch = FULL) -> torch.Tensor:
    weights = net.weights(arch)
    return torch.stack([head(weights, s) for s in unroll(weights, batch(seed).rows, embed, 2)])


def losses(net: Supernet) -> Iterator[torch.Tensor]:
    for seed in range(3):
        yield logits(net, seed).square().mean()


def test_order_preserves_the_full_draft_and_is_idempotent(supernet: Supernet) -> None:
    before = logits(supernet)
    orders = [score.order() for score in measure_importance(supernet, losses(supernet))]
    assert any(not torch.equal(o.channels_I, torch.arange(FFN)) for o in orders)
    assert any(not torch.equal(o.groups_K, torch.arange(GROUPS)) for o in orders)
    narrow = FULL.replace(ffn_ratio=0.5, head_ratio=0.5)
    narrow_before = logits(supernet, arch=narrow)
    apply_order(supernet, orders)
    torch.testing.assert_close(logits(supernet), before)
    assert not torch.allclose(logits(supernet, arch=narrow), narrow_before)
    for score in measure_importance(supernet, losses(supernet)):
        assert score.order().groups_K.tolist() == list(range(GROUPS))
        assert score.order().channels_I.tolist() == list(range(FFN))
        assert (score.channels_I.diff() <= 1e-12).all()


def test_scores_are_what_zeroing_costs_to_first_order(supernet: Supernet) -> None:
    scores = measure_importance(supernet, [logits(supernet).square().mean()])
    layer = supernet.body.layers[1]
    loss = logits(supernet).square().mean()
    parts = [getattr(layer, name) for name in ("gate", "up", "down")]
    gate, up, down = torch.autograd.grad(loss, parts)
    wanted = (gate * layer.gate).sum(1) + (up * layer.up).sum(1) + (down * layer.down).sum(0)
    torch.testing.assert_close(scores[1].channels_I, wanted.abs().detach())


def test_planted_channel_and_group_end_first(supernet: Supernet) -> None:
    planted_channel, planted_group = 7, 2
    rows = HEADS // GROUPS * HEAD_SIZE
    with torch.no_grad():
        for layer in supernet.body.layers:
            for name in ("gate", "up"):
                getattr(layer, name)[planted_channel] *= 4
            layer.down[:, planted_channel] *= 10
            layer.v[planted_group * HEAD_SIZE : (planted_group + 1) * HEAD_SIZE] *= 6
            layer.o[:, planted_group * rows : (planted_group + 1) * rows] *= 6
    for score in measure_importance(supernet, losses(supernet)):
        assert int(score.order().channels_I[0]) == planted_channel
        assert int(score.order().groups_K[0]) == planted_group


def test_moments_and_averages_move_with_the_weights(supernet: Supernet) -> None:
    optimizer = torch.optim.AdamW(supernet.parameters())
    logits(supernet).square().mean().backward()
    optimizer.step()
    averages = {n: p.detach().clone() for n, p in supernet.named_parameters()}
    for parameter in supernet.parameters():  # a moment that can be told from the weight
        optimizer.state[parameter]["exp_avg"].copy_(2 * parameter.detach())
    step_before = {n: float(optimizer.state[p]["step"]) for n, p in supernet.named_parameters()}
    order = LayerOrder(torch.tensor([3, 1, 0, 2]), torch.arange(FFN).flip(0))
    apply_order(supernet, [order, order], optimizer, averages)
    moved = 0
    for name, parameter in supernet.named_parameters():
        assert torch.equal(averages[name], parameter)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], 2 * parameter)
        assert float(optimizer.state[parameter]["step"]) == step_before[name]
        moved += parameter.ndim == 2
    assert moved == 15


def test_importance_without_batches_is_refused(supernet: Supernet) -> None:
    with pytest.raises(UserError, match="at least one calibration batch"):
        measure_importance(supernet, [])
