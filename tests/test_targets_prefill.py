"""Prefill: logits, tapped features, merged embeddings; batches equal single prompts."""

import pytest
import torch
from target_models import (
    FAMILIES,
    IMAGE_FAMILIES,
    IMAGE_TOKEN,
    VARIANTS,
    build_prompt,
    build_target,
    image_tensors,
)
from target_oracle import extend, full_forward

from dreams_nas.core.errors import UserError
from dreams_nas.targets.families import adapter_for

CASES = [(family, n) for family in IMAGE_FAMILIES for n in (0, 1, 2)] + [
    (family, 0) for family in ("llama", *VARIANTS)
]
TOLERANCE = 1e-10


@pytest.mark.parametrize(("family", "num_images"), CASES)
def test_prefill_equals_the_models_own_forward(family, num_images):
    target = build_target(family, num_layers=3)
    prompt = build_prompt(target, num_images)
    cache = target.build_cache(64)
    out = target.prefill(prompt, cache, target_layer_ids=(2, 0))
    logits_TV, states = full_forward(target, prompt, [])
    assert cache.length == len(prompt.input_ids_T)
    assert out.importance_T is None
    torch.testing.assert_close(out.logits_V, logits_TV[-1], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(out.embeddings_TD, states[0], rtol=0, atol=TOLERANCE)
    last_TD, first_TD = out.features_TF.chunk(2, dim=1)  # in the order asked for
    torch.testing.assert_close(first_TD, states[1], rtol=0, atol=TOLERANCE)
    normed_TD = target.decoder.norm(last_TD)  # transformers' own last entry is after the norm
    torch.testing.assert_close(normed_TD, states[-1], rtol=0, atol=TOLERANCE)
    assert (last_TD - states[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_of_a_pass_follow_the_call(family):
    target = build_target(family, num_layers=3)
    prompt = build_prompt(target, 0)
    token, root = torch.tensor([5]), torch.zeros(1, dtype=torch.long)
    _, states = full_forward(target, prompt, [5])
    for layer_ids in ((), (1,), (0, 1), (1, 0)):
        cache = target.build_cache(32)
        assert target.prefill(prompt, cache).features_TF.shape == (12, 0)
        out = target.verify(token, root, None, cache, target_layer_ids=layer_ids)
        assert out.features_QF.shape == (1, 32 * len(layer_ids))
        for place, layer in enumerate(layer_ids):
            found = out.features_QF[0, 32 * place : 32 * (place + 1)]
            torch.testing.assert_close(found, states[layer + 1][-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_spans_hold_the_image_tokens_and_embeddings_the_images(family):
    target = build_target(family)
    prompt = build_prompt(target, 2)
    assert len(prompt.image_spans) == 2
    covered = torch.zeros_like(prompt.image_mask_T)
    for start, stop in prompt.image_spans:
        covered[start:stop] = True
    assert torch.equal(covered, prompt.image_mask_T)
    assert torch.equal(covered, prompt.input_ids_T == IMAGE_TOKEN)
    merged_TD = target.prefill(prompt, target.build_cache(64)).embeddings_TD
    text_TD = target.embed(prompt.input_ids_T)
    differs = (merged_TD - text_TD).abs().amax(1) > 1e-6
    assert torch.equal(differs, prompt.image_mask_T)
    other = build_prompt(target, 2, seed=1)
    pixels = other.model_inputs["pixel_values"]
    swapped = target.build_inputs(
        prompt.input_ids_T, {**prompt.model_inputs, "pixel_values": pixels}
    )
    logits = [target.prefill(p, target.build_cache(64)).logits_V for p in (prompt, swapped)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3, "the pixels do not matter"


def test_adjacent_images_keep_their_own_spans():
    target = build_target("llava")
    ids = torch.tensor([5] + [IMAGE_TOKEN] * 18 + [6, 7])
    prompt = target.build_inputs(ids, image_tensors(target, 2))
    assert prompt.image_spans == ((1, 10), (10, 19))


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_wrong_number_of_image_tokens_is_refused(family):
    target = build_target(family)
    prompt = build_prompt(target, 1)
    count = int(prompt.image_mask_T.sum())
    ids = torch.cat((prompt.input_ids_T, torch.tensor([IMAGE_TOKEN])))
    with pytest.raises(UserError) as caught:
        target.build_inputs(ids, prompt.model_inputs, image_sizes=[(640, 480)])
    message = str(caught.value)
    assert f"{count + 1} image tokens" in message
    assert f"{count} visual features" in message
    assert "640 x 480" in message


def test_prompt_longer_than_the_positions_is_refused():
    target = build_target("llama")
    target.build_inputs(torch.full((512,), 5))
    with pytest.raises(UserError, match=r"513 tokens, but .* has 512 positions"):
        target.build_inputs(torch.full((513,), 5))


def test_prefill_wants_an_empty_cache():
    target = build_target("llama")
    cache = target.build_cache(32)
    target.prefill(build_prompt(target), cache)
    with pytest.raises(AssertionError, match="empty cache"):
        target.prefill(build_prompt(target), cache)
    cache.reset()
    target.prefill(build_prompt(target), cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_generates_what_each_prompt_generates_alone(family):
    target = build_target(family)
    counts = (0, 0, 0) if family == "llama" else (2, 0, 1)
    prompts = [
        build_prompt(target, n, num_text=9 + 2 * n, seed=n + 7 * i) for i, n in enumerate(counts)
    ]
    batch, offsets = target.collate(prompts)
    longest = batch["input_ids"].shape[1]
    assert [longest - offset for offset in offsets] == [len(p.input_ids_T) for p in prompts]
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    together = target.model.generate(**batch, **settings)[:, longest:]
    for prompt, row in zip(prompts, together, strict=True):
        alone = target.collate([prompt])[0]
        single = target.model.generate(**alone, **settings)[0, len(prompt.input_ids_T) :]
        assert row.tolist() == single.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_a_batch_equal_those_alone(family):
    target = build_target(family, num_layers=3)
    counts = (0, 0) if family == "llama" else (1, 2)
    prompts = [build_prompt(target, n, seed=i) for i, n in enumerate(counts)]
    longest = max(len(p.input_ids_T) for p in prompts) + 3
    padded = [extend(p, [5] * (longest - len(p.input_ids_T))) for p in prompts]
    batch, offsets = target.collate(padded)
    assert offsets == [0, 0]
    with torch.inference_mode(), target.capture_layers((1, 2)) as states:
        target.model(**batch)
    for row, prompt in enumerate(prompts):
        out = target.prefill(prompt, target.build_cache(64), target_layer_ids=(1, 2))
        found = torch.cat([states[k][row, : len(prompt.input_ids_T)] for k in (1, 2)], dim=1)
        torch.testing.assert_close(found, out.features_TF, rtol=0, atol=TOLERANCE)


def test_unknown_family_names_the_known_ones():
    config = build_target("llama").model.config
    config.model_type = "lama"
    with pytest.raises(UserError, match=r"target family 'lama' .*did you mean 'llama'.*qwen2_5_vl"):
        adapter_for(config, "somewhere/config.json")
