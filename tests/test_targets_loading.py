"""Targets from folders: round trips, identities, and damage that must not pass silently."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from target_models import build_model, build_prompt, build_tokenizer, save_target

from dreams_nas.core.errors import UserError
from dreams_nas.targets.families import wrap_model
from dreams_nas.targets.loading import load_target
from dreams_nas.targets.spec import hash_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def llama(tmp_path):
    save_target(tmp_path / "tiny", "llama")
    return tmp_path / "tiny"


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llava", "llama"])
def test_saved_target_loads_equal(tmp_path, family):
    model = save_target(tmp_path / "tiny", family)
    loaded = load_target(tmp_path / "tiny", device="cpu", dtype="float64", threads=1)
    original = wrap_model(model.double(), tokenizer=loaded.tokenizer)
    assert loaded.spec.name.endswith("/tiny")
    assert loaded.spec == original.spec.replace(name=loaded.spec.name)
    prompt = build_prompt(original, 1 if family == "llava" else 0)
    logits = [t.prefill(prompt, t.build_cache(32)).logits_V for t in (loaded, original)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
    assert loaded.dtype == torch.float64
    assert (loaded.processor is not None) == (family == "llava")
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_spec_tells_targets_apart_by_what_matters(tmp_path):
    base = wrap_model(build_model("llama"), tokenizer=build_tokenizer()).spec
    other_weights = wrap_model(build_model("llama", seed=1), tokenizer=build_tokenizer()).spec
    other_shape = wrap_model(build_model("llama", num_layers=3), tokenizer=build_tokenizer()).spec
    half = wrap_model(build_model("llama").bfloat16().float()).spec
    assert base.shape_hash == other_weights.shape_hash != other_shape.shape_hash
    assert base.embedding_hash != other_weights.embedding_hash
    assert base.embedding_hash != half.embedding_hash
    assert half.embedding_hash == wrap_model(build_model("llama").bfloat16()).spec.embedding_hash
    assert half.tokenizer_hash == "none"
    assert base.eos_token_ids == (2,)
    assert base.max_positions == 512
    assert base.rms_norm_eps == 1e-5
    assert base.dims.model_dump() == {
        "hidden": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "ffn": 64,
        "vocab": 97,
    }


def test_tokenizer_hash_is_about_tokens_alone():
    tokenizer = build_tokenizer()
    before = hash_tokenizer(tokenizer)
    tokenizer(["w5", "w5 w6"], padding=True, truncation=True, max_length=7)
    assert hash_tokenizer(tokenizer) == before
    tokenizer.add_tokens(["new"])
    assert hash_tokenizer(tokenizer) != before


def test_every_end_token_is_known():
    model = build_model("llama")
    model.generation_config.eos_token_id = [7, 4]
    assert wrap_model(model, tokenizer=build_tokenizer()).spec.eos_token_ids == (2, 4, 7)
    model.generation_config.eos_token_id = None
    assert wrap_model(model).spec.eos_token_ids == ()


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"],
)
def test_missing_weight_is_an_error(llama, name):
    change_weights(llama, lambda weights: weights.pop(name))
    with pytest.raises(UserError, match=f"lack {name}; the checkpoint is incomplete"):
        load_target(llama, device="cpu")


def test_tied_head_is_not_missing(tmp_path):
    folder = tmp_path / "tied"
    save_target(folder, "llama")
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    target = load_target(folder, device="cpu")
    torch.testing.assert_close(
        target.head_weight_VD, target.model.get_input_embeddings().weight, rtol=0, atol=0
    )


def test_weight_that_is_not_finite_is_named(llama):
    def spoil(weights):
        weights["model.norm.weight"][3] = float("nan")

    change_weights(llama, spoil)
    with pytest.raises(UserError, match=r"model\.norm\.weight hold values that are not finite"):
        load_target(llama, device="cpu")


def test_weight_of_another_shape_is_named(llama):
    def cut(weights):
        weights["lm_head.weight"] = weights["lm_head.weight"][:50].clone()

    change_weights(llama, cut)
    with pytest.raises(UserError, match=r"shapes of lm_head\.weight differ"):
        load_target(llama, device="cpu")


def test_missing_and_broken_folders(tmp_path, llama):
    cases = {
        tmp_path / "gone": "no such folder",
        "no-such-target": "no such folder.*hub id",
        tmp_path: "holds no config.json",
        llama / "config.json": "is a file; give the folder",
    }
    for name, words in cases.items():
        with pytest.raises(UserError, match=words):
            load_target(name, device="cpu")


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "llama", "hidden_size": "many"}'])
def test_broken_config_names_the_file(llama, text):
    (llama / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        load_target(llama, device="cpu")


def test_truncated_weights_are_a_user_error(llama):
    path = llama / WEIGHTS
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot read its weights"):
        load_target(llama, device="cpu")


def test_pickled_weights_are_never_read(llama):
    torch.save(load_file(llama / WEIGHTS), llama / "pytorch_model.bin")
    (llama / WEIGHTS).unlink()
    with pytest.raises(UserError, match="cannot read its weights"):
        load_target(llama, device="cpu")


def test_remote_code_is_never_run(llama):
    (llama / "modeling_own.py").write_text("raise SystemExit('remote code ran')")
    change_config(llama, model_type="own", auto_map={"AutoConfig": "modeling_own.OwnConfig"})
    with pytest.raises(UserError, match=r"config\.json"):
        load_target(llama, device="cpu")


def test_family_is_checked_before_the_weights(llama):
    (llama / WEIGHTS).unlink()
    change_config(llama, model_type="gpt2")
    with pytest.raises(UserError, match=r"unknown target family 'gpt2'.*llava"):
        load_target(llama, device="cpu")


def test_missing_processor_is_found_before_the_weights(tmp_path):
    save_target(tmp_path / "tiny", "llava")
    for path in (tmp_path / "tiny").glob("*processor_config.json"):
        path.unlink()
    (tmp_path / "tiny" / WEIGHTS).unlink()
    with pytest.raises(UserError, match="processor"):
        load_target(tmp_path / "tiny", device="cpu")


def test_missing_tokenizer_is_a_user_error(llama):
    for path in llama.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match="tokenizer"):
        load_target(llama, device="cpu")


def test_unknown_device_is_a_user_error(llama):
    with pytest.raises(UserError, match="device = gpu"):
        load_target(llama, device="gpu")
