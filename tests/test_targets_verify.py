"""Every family: a pass over a tree equals the model's own forward over each path, in fp64."""

import os
from typing import Any

import pytest
import torch
from target_models import (
    FAMILIES,
    IMAGE_FAMILIES,
    VARIANTS,
    WINDOW,
    build_prompt,
    build_target,
)
from target_oracle import Tree, extend, full_forward

from dreams_nas.targets.cache import PreallocatedCache
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs, VerifyOutput

CASES = [(family, n) for family in IMAGE_FAMILIES for n in (0, 1, 2)] + [("llama", 0)]
MORE = [(family, 1 if family.startswith("llava") else 0) for family in VARIANTS]
TOLERANCE = 1e-10
EAGER_TOLERANCE = 1e-4
"""Eager attention of transformers takes its softmax in fp32, whatever the model's dtype."""
LAYERS = (0, 2)


def prefilled(target: HuggingFaceTarget, prompt: TargetInputs) -> PreallocatedCache:
    cache = target.build_cache(96)
    target.prefill(prompt, cache)
    return cache


def tree_error(target: HuggingFaceTarget, prompt: TargetInputs, tree: Tree, out: VerifyOutput):
    """Largest difference of logits and features from the forwards over whole paths."""
    error = 0.0
    for leaf in set(range(len(tree.parents))) - set(tree.parents):
        path = tree.paths[leaf]
        logits_TV, states = full_forward(target, prompt, tree.path_tokens(leaf))
        features_TF = torch.cat([states[k + 1] for k in LAYERS], dim=1)
        for found, expected in ((out.logits_QV, logits_TV), (out.features_QF, features_TF)):
            error = max(error, float((found[path] - expected[-len(path) :]).abs().max()))
    return error


def verify_tree(target, cache, tree: Tree, depths=None, mask=None) -> VerifyOutput:
    return target.verify(
        tree.tokens_Q,
        tree.depths_Q if depths is None else depths,
        tree.mask_QQ if mask is None else mask,
        cache,
        target_layer_ids=LAYERS,
    )


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_verification_shares_key_value_heads_instead_of_repeating_them(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build_target("llama", num_layers=2, dtype=torch.float32)
    cache = prefilled(target, build_prompt(target))
    hidden = torch.finfo(torch.float32).min
    mask_QQ = None if num_rows == 1 else torch.full((num_rows, num_rows), hidden).triu_(1)
    rows = (torch.arange(5, 5 + num_rows), torch.arange(num_rows), mask_QQ)
    arguments = target.verify_arguments(*rows, cache)
    with torch.inference_mode():
        repeated_QV = target.model.lm_head(target.decoder(**arguments).last_hidden_state)[0]

    def refuse(*_: Any) -> None:
        raise AssertionError("keys and values were repeated")

    for name in ("repeat_kv", "pack_gqa"):
        monkeypatch.setattr(f"transformers.integrations.sdpa_attention.{name}", refuse)
    assert torch.allclose(target.verify(*rows, cache).logits_QV, repeated_QV, atol=1e-5)
    assert "TRANSFORMERS_SDPA_FORCE_GQA" not in os.environ
    with pytest.raises(AssertionError, match="repeated"):
        target.decoder(**arguments)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "num_images"), CASES + MORE)
def test_tree_equals_paths_and_commit_equals_prefill(family, num_images, attention):
    target = build_target(family, num_layers=4, attention=attention)
    prompt = build_prompt(target, num_images)
    tolerance = TOLERANCE if attention == "sdpa" else EAGER_TOLERANCE
    cache = prefilled(target, prompt)
    history: list[int] = []
    for seed in (1, 2):  # the second round stands on moved rows
        tree = Tree(9, target.dtype, seed)
        out = verify_tree(target, cache, tree)
        assert tree_error(target, extend(prompt, history), tree, out) < tolerance
        row = max(range(10), key=lambda r: (len(tree.paths[r]), r))
        assert tree.paths[row] != list(range(len(tree.paths[row])))
        cache.commit(tree.paths[row])
        history += tree.path_tokens(row)
    fresh = prefilled(target, extend(prompt, history))
    assert cache.length == fresh.length == len(prompt.input_ids_T) + len(history)
    assert cache.position_delta == fresh.position_delta
    torch.testing.assert_close(cache.committed(), fresh.committed(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("fault", ["depth", "mask"])
@pytest.mark.parametrize("family", FAMILIES)
def test_planted_fault_is_found(family, fault):
    target = build_target(family, num_layers=4)
    prompt = build_prompt(target, 0 if family == "llama" else 1)
    cache = prefilled(target, prompt)
    tree = Tree(9, target.dtype, 1)
    depths, mask = tree.depths_Q.clone(), tree.mask_QQ.clone()
    if fault == "depth":
        depths[4] += 1
    else:
        mask[4, 3] = 0.0 if 3 not in tree.paths[4] else torch.finfo(mask.dtype).min
    out = verify_tree(target, cache, tree, depths, mask)
    assert tree_error(target, prompt, tree, out) > 1e-3


@pytest.mark.parametrize("family", ["gemma3", "gemma3_text", "qwen2_sliding", "llava_mistral"])
def test_planted_window_fault_is_found(monkeypatch, family):
    target = build_target(family, num_layers=4)
    prompt = build_prompt(target, int(target.takes_images))
    assert len(prompt.input_ids_T) > WINDOW
    cache = prefilled(target, prompt)
    tree = Tree(9, target.dtype, 1)
    monkeypatch.setattr(target, "_window", WINDOW + 1)
    assert tree_error(target, prompt, tree, verify_tree(target, cache, tree)) > 1e-3


def test_gemma3_tree_that_crosses_its_window():
    """A chain longer than the window: late rows must not see early rows of the same pass."""
    target = build_target("gemma3", num_layers=4)
    prompt = build_prompt(target, 0, num_text=4)
    cache = prefilled(target, prompt)
    tree = Tree(WINDOW + 3, target.dtype, 0)
    tree.parents = list(range(-1, WINDOW + 2))
    tree.paths = [list(range(row + 1)) for row in range(WINDOW + 4)]
    tree.depths_Q = torch.arange(WINDOW + 4)
    tree.mask_QQ = torch.full_like(tree.mask_QQ, torch.finfo(target.dtype).min).triu(1)
    assert tree_error(target, prompt, tree, verify_tree(target, cache, tree)) < TOLERANCE


def test_qwen_positions_leak_nothing_between_prompts():
    target = build_target("qwen2_5_vl", num_layers=4)
    prompts = [build_prompt(target, 2), build_prompt(target, 0, seed=5), build_prompt(target, 1)]
    caches = [prefilled(target, prompt) for prompt in prompts]
    deltas = [cache.position_delta for cache in caches]
    assert deltas == [-3 - 2, 0, -3]  # a 2 x 3 grid takes 3 positions, a 2 x 2 grid 2
    assert target.model.model.rope_deltas is None
    tree = Tree(9, target.dtype, 1)
    for prompt, cache in zip(prompts, caches, strict=True):  # interleaved sequences
        assert tree_error(target, prompt, tree, verify_tree(target, cache, tree)) < TOLERANCE
        cache.position_delta += 1
        assert tree_error(target, prompt, tree, verify_tree(target, cache, tree)) > 1e-3


@pytest.mark.parametrize(("family", "num_images"), CASES)
def test_twelve_greedy_tokens_equal_generate(family, num_images):
    target = build_target(family)
    prompt = build_prompt(target, num_images, seed=3)
    cache = target.build_cache(64)
    root = torch.zeros(1, dtype=torch.long)
    tokens = [int(target.prefill(prompt, cache).logits_V.argmax())]
    while len(tokens) < 12:
        out = target.verify(torch.tensor(tokens[-1:]), root, None, cache)
        cache.commit([0])
        tokens.append(int(out.logits_QV[0].argmax()))
    generated = target.model.generate(
        prompt.input_ids_T[None],
        **prompt.model_inputs,
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert tokens == generated[0, len(prompt.input_ids_T) :].tolist()
    assert len(set(tokens)) > 2, "a repeating answer would prove little"


@pytest.mark.parametrize("family", FAMILIES)
def test_uncommitted_pass_leaves_no_trace(family):
    target = build_target(family)
    prompt = build_prompt(target, 0)
    cache = prefilled(target, prompt)
    before = cache.committed().clone()
    first = verify_tree_pair(target, cache, Tree(5, target.dtype, 1))
    cache.commit([])
    verify_tree_pair(target, cache, Tree(3, target.dtype, 2))  # overwritten without a commit
    again = verify_tree_pair(target, cache, Tree(5, target.dtype, 1))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(cache.committed(), before, rtol=0, atol=0)


def verify_tree_pair(target, cache, tree):
    return target.verify(tree.tokens_Q, tree.depths_Q, tree.mask_QQ, cache).logits_QV.clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_are_gone_after_use_and_after_a_failure(family):
    target = build_target(family)
    prompt = build_prompt(target, 0)
    target.prefill(prompt, target.build_cache(32), target_layer_ids=(0, 1), want_importance=True)
    with pytest.raises(RuntimeError, match="cache of 4 rows"):
        target.prefill(prompt, target.build_cache(4), target_layer_ids=(0, 1))
    hooks = [m for m in target.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == []


@pytest.mark.parametrize("family", FAMILIES + VARIANTS)
def test_head_and_embed_are_the_models_own(family):
    target = build_target(family)
    prompt = build_prompt(target, 0)
    cache = target.build_cache(32)
    out = target.prefill(prompt, cache, target_layer_ids=(1,))
    logits_TV, states = full_forward(target, prompt, [])
    torch.testing.assert_close(target.head(out.features_TF), logits_TV, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(target.embed(prompt.input_ids_T), states[0], rtol=0, atol=0)
    assert target.head_weight_VD.shape == (97, 32)
    assert target.inv_freq.shape == (4,)
    assert target.inv_freq.dtype == torch.float32
