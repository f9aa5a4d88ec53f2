"""A subnet inside the supernet equals the extracted draft, and trains exactly its views."""

import itertools

import pytest
import torch
from recordings import made_up_recording, shake
from target_models import VOCAB, build_target

from dreams_nas.core.errors import UserError
from dreams_nas.draft.layers import head
from dreams_nas.draft.model import load_draft
from dreams_nas.draft.unroll import unroll
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.replay.batches import AnswerBatch, build_batch
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.supernet.checkpoint import (
    build_supernet,
    load_supernet,
    save_supernet,
    supernet_config,
)
from dreams_nas.supernet.supernet import Supernet
from dreams_nas.targets.huggingface import HuggingFaceTarget

HIDDEN = 32
SPACE = SearchSpace(
    tap=("three", "last"),
    depth=(1, 2),
    head_ratio=(0.5, 1.0),
    ffn_ratio=(0.5, 1.0),
    keep_ratio=(0.5, 1.0),
    vocab=(0.25, 1.0),
)


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return build_target("llama", num_layers=4)


@pytest.fixture
def supernet(target: HuggingFaceTarget) -> Supernet:
    config = supernet_config(target, SPACE.tap_layers(target.spec.dims), 2)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    net = build_supernet(config, target, order)
    shake(net.body)
    return net


def batch_for(target: HuggingFaceTarget, arch: DraftArch, dtype: torch.dtype) -> AnswerBatch:
    recording = made_up_recording(
        [5, 6, 7, 8],
        prompt=[1, 90, 90, 90, 2],
        hidden=HIDDEN,
        layer_ids=(0, 1, 2, 3),
        image_spans=((1, 4),),
        dtype=dtype,
    )
    taps = arch.sizes(target.spec.dims).target_layer_ids
    return build_batch([recording], taps, arch.keep_ratio, target.embed, dtype=dtype)


def logits_of(weights: DraftWeights, batch: AnswerBatch, target: HuggingFaceTarget) -> torch.Tensor:
    embed = lambda tokens: target.embed(tokens).to(batch.states_BRD.dtype)  # noqa: E731
    return torch.stack([head(weights, s) for s in unroll(weights, batch.rows, embed, 3)])


def test_every_choice_equals_its_extracted_draft(
    target: HuggingFaceTarget, supernet: Supernet
) -> None:
    config = supernet_config(target, supernet.tap_layer_ids, 2)
    seen: dict[str, torch.Tensor] = {}
    for arch in SPACE.enumerate():
        batch = batch_for(target, arch, torch.float32)
        inside = logits_of(supernet.weights(arch), batch, target)
        draft = supernet.extract(config.draft_config(arch))
        alone = logits_of(draft.weights(target.head_weight_VD.float()), batch, target)
        assert torch.equal(inside, alone), arch.key
        assert inside.shape[-1] == len(draft.vocab_ids_W) == arch.sizes(supernet.dims).vocab
        seen[arch.key] = inside.flatten()[:3].detach()
    assert len(seen) == 64
    # No dimension is ignored: two drafts that differ in a body dimension give other logits.
    bodies = [SPACE.largest(), *(SPACE.largest().replace(**c) for c in (
        {"tap": "last"}, {"depth": 1}, {"head_ratio": 0.5}, {"ffn_ratio": 0.5}, {"keep_ratio": 0.5}
    ))]  # fmt: skip
    for one, other in itertools.combinations(bodies, 2):
        assert not torch.allclose(seen[one.key], seen[other.key])


def test_extracted_draft_is_a_copy_and_survives_disk(
    target: HuggingFaceTarget, supernet: Supernet, tmp_path: pytest.TempPathFactory
) -> None:
    arch = DraftArch(tap="last", head_ratio=0.5, ffn_ratio=0.5, vocab=0.25)
    config = supernet_config(target, supernet.tap_layer_ids, 2)
    draft = supernet.extract(config.draft_config(arch))
    batch = batch_for(target, arch, torch.float32)
    before = logits_of(draft.weights(target.head_weight_VD.float()), batch, target)
    with torch.no_grad():
        for parameter in supernet.parameters():
            parameter.zero_()
    folder = tmp_path / "draft"  # type: ignore[operator]
    draft.save(folder)
    again = load_draft(folder)
    after = logits_of(again.weights(target.head_weight_VD.float()), batch, target)
    assert torch.equal(before, after)


def test_gradients_of_a_subnet_touch_exactly_its_views(
    target: HuggingFaceTarget, supernet: Supernet
) -> None:
    arch = DraftArch(tap="last", depth=1, head_ratio=0.5, ffn_ratio=0.5, vocab=0.25)
    batch = batch_for(target, arch, torch.float32)
    logits_of(supernet.weights(arch), batch, target).square().sum().backward()
    sizes, head_size = arch.sizes(supernet.dims), supernet.dims.head_size
    first, second = supernet.body.layers[0], supernet.body.layers[1]
    assert all(p.grad is None for p in second.parameters())
    expected = {
        "q": (slice(0, sizes.num_heads * head_size), slice(None)),
        "k": (slice(0, sizes.num_kv_heads * head_size), slice(None)),
        "v": (slice(0, sizes.num_kv_heads * head_size), slice(None)),
        "o": (slice(None), slice(0, sizes.num_heads * head_size)),
        "gate": (slice(0, sizes.ffn), slice(None)),
        "up": (slice(0, sizes.ffn), slice(None)),
        "down": (slice(None), slice(0, sizes.ffn)),
    }
    for name, view in expected.items():
        gradient = getattr(first, name).grad
        inside = torch.zeros_like(gradient, dtype=torch.bool)
        inside[view] = True
        assert (gradient[inside] != 0).float().mean() > 0.9, name
        assert not gradient[~inside].any(), name
    blocks = supernet.body.fc.grad.split(HIDDEN, dim=1)
    touched = [bool(block.any()) for block in blocks]
    assert touched == [k == 3 for k in supernet.tap_layer_ids]


def test_subnets_outside_are_refused(target: HuggingFaceTarget, supernet: Supernet) -> None:
    with pytest.raises(UserError, match="depth 3 is outside this supernet, which has 2 layers"):
        supernet.weights(DraftArch(depth=3))
    config = supernet_config(target, (3,), 1)
    narrow = build_supernet(config, target, torch.arange(VOCAB))
    with pytest.raises(UserError, match=r"tap 'three' reads target layers \[0, 1, 2\]"):
        narrow.weights(DraftArch(tap="three"))


def test_supernet_folder_loads_to_the_same_supernet(
    target: HuggingFaceTarget, supernet: Supernet, tmp_path: pytest.TempPathFactory
) -> None:
    folder = tmp_path / "supernet"  # type: ignore[operator]
    config = supernet_config(target, supernet.tap_layer_ids, 2)
    save_supernet(folder, supernet, config)
    loaded, found = load_supernet(folder, target)
    assert found == config
    for name, tensor in supernet.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert torch.equal(loaded.head_VD, supernet.head_VD)
    with pytest.raises(UserError, match="token embedding"):
        load_supernet(folder, build_target("llama", num_layers=4, seed=8))
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_supernet(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no supernet weights"):
        load_supernet(folder, target)
