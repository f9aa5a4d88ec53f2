"""Draft checkpoints: what is saved comes back, what is broken is refused by name."""

from pathlib import Path

import pytest
import torch
from draft_models import build_config, build_draft
from safetensors.torch import load_file, save_file
from target_models import build_target

from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json, write_json
from dreams_nas.decode.drafting import ready_draft
from dreams_nas.draft.cache import DraftCache
from dreams_nas.draft.model import DraftModel, load_draft
from dreams_nas.space.arch import DraftArch, TargetDims, tap_layer_ids
from dreams_nas.space.tree import StaticTree

ARCH = DraftArch(tap="last", depth=2, head_ratio=0.5, ffn_ratio=0.5, vocab=0.25, keep_ratio=0.5)


@pytest.fixture
def draft() -> DraftModel:
    return build_draft(build_target("llama"), ARCH)


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors")


def test_a_saved_draft_loads_to_equal_tensors_and_configuration(
    draft: DraftModel, tmp_path: Path
) -> None:
    draft.config = draft.config.replace(policy=StaticTree.chain(3))
    draft.save(tmp_path)
    loaded = load_draft(tmp_path)
    assert loaded.config == draft.config
    ours, theirs = draft.to_tensors(), loaded.to_tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.to(theirs[name].dtype), theirs[name]), name


def test_rotary_frequencies_survive_a_cast_to_bf16(draft: DraftModel) -> None:
    before = draft.body.inv_freq.clone()
    assert torch.equal(draft.to(torch.bfloat16).to_tensors()["inv_freq"], before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "fc.weight"),
        ({"extra": torch.zeros(1)}, "extra"),
        ({"norm__weight": torch.zeros(3)}, r"norm\.weight.*\[3\].*\[32\]"),
        ({"fc__weight": torch.full((32, 32), float("nan"))}, "not finite"),
        ({"vocab_ids": torch.zeros(24, dtype=torch.int64)}, "different tokens of 0..96"),
        ({"vocab_ids": torch.arange(24) + 80}, "different tokens of 0..96"),
        ({"vocab_ids": torch.arange(5)}, "5 tokens"),
        ({"inv_freq": None}, "inv_freq"),
    ],
)
def test_broken_weights_are_refused_by_name(
    draft: DraftModel, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    draft.float().save(tmp_path)
    edit_tensors(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_draft(tmp_path)


def test_a_missing_or_truncated_file_is_refused(draft: DraftModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        load_draft(tmp_path)
    draft.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_draft(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match="no draft weights"):
        load_draft(tmp_path)


def test_an_unknown_configuration_key_is_refused(draft: DraftModel, tmp_path: Path) -> None:
    draft.save(tmp_path)
    config = read_json(tmp_path / "config.json")
    config["arch"]["dephth"] = config["arch"].pop("depth")
    write_json(tmp_path / "config.json", config)
    with pytest.raises(UserError, match="depth"):
        load_draft(tmp_path)


def test_a_draft_of_another_target_is_refused() -> None:
    draft = build_draft(build_target("llama", seed=0), ARCH)
    with pytest.raises(UserError, match="token embedding"):
        ready_draft(draft, build_target("llama", seed=1))


def test_draft_cache_bytes_equal_the_arithmetic_and_overflow_is_noticed() -> None:
    target = build_target("llama")
    draft = build_draft(target, ARCH)
    cache = DraftCache(draft.weights(target.head_weight_VD), capacity=10)
    # 2 layers, keys and values, 1 of 2 key/value heads, 10 rows of 8 units in fp64
    assert cache.num_bytes == 2 * 2 * 1 * 10 * 8 * 8
    cache.open(10)
    with pytest.raises(AssertionError, match="needs 11"):
        cache.open(1)


def test_sizes_keep_whole_key_value_groups() -> None:
    dims = TargetDims(
        hidden=192, num_layers=8, num_heads=8, num_kv_heads=4, head_size=24, ffn=512, vocab=4096
    )
    sizes = DraftArch(head_ratio=0.5, ffn_ratio=0.5, vocab=0.125).sizes(dims)
    assert (sizes.num_kv_heads, sizes.num_heads, sizes.ffn, sizes.vocab) == (2, 4, 256, 512)
    assert DraftArch(head_ratio=0.1).sizes(dims).num_heads == 2
    assert sizes.target_layer_ids == (1, 3, 5)


@pytest.mark.parametrize(
    ("tap", "num_layers", "expected"),
    [
        ("last", 8, (7,)),
        ("0.25", 8, (1,)),
        ("0.5", 2, (0,)),
        ("0.75", 6, (4,)),
        ("three", 32, (1, 15, 28)),
        ("three", 12, (1, 5, 8)),
        ("three", 11, (2, 5, 7)),
        ("three", 4, (0, 1, 2)),
    ],
)
def test_taps_follow_the_published_rule(tap: str, num_layers: int, expected: object) -> None:
    assert tap_layer_ids(tap, num_layers) == expected  # type: ignore[arg-type]


def test_taps_that_coincide_are_refused() -> None:
    with pytest.raises(UserError, match="2 blocks"):
        tap_layer_ids("three", 2)


def test_config_holds_the_targets_identity() -> None:
    target = build_target("llama")
    config = build_config(target, ARCH)
    config.require_target(target.spec.tokenizer_hash, target.spec.embedding_hash, target.spec.name)
