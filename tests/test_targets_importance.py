"""Importance of image tokens: against full attention maps, alone and in batches."""

import pytest
import torch
from target_models import IMAGE_FAMILIES, WINDOW, build_prompt, build_target
from target_oracle import extend

from dreams_nas.targets import importance as importance_module
from dreams_nas.targets.importance import attention_mass, round_per_image


def maps_of(target, prompt, layer):
    """Attention probabilities [H, T, T] of a block, by transformers' own eager attention."""
    with torch.inference_mode():
        output = target.model(
            input_ids=prompt.input_ids_T[None],
            **prompt.model_inputs,
            output_attentions=True,
            use_cache=False,
        )
    return output.attentions[layer][0]


def expected_mass(maps_HTT, prompt, span):
    """The definition, word by word."""
    rows = [
        row for row in range(span[1], len(prompt.input_ids_T)) if not bool(prompt.image_mask_T[row])
    ]
    per_head = maps_HTT[:, rows].clone()
    per_head[:, :, 0] = 0
    per_head /= per_head.sum(-1, keepdim=True)
    return per_head.mean((0, 1))


@pytest.mark.parametrize("num_images", [1, 2])
@pytest.mark.parametrize("num_layers", [2, 4, 5])
@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, "llava_mistral"])
def test_importance_equals_the_definition_on_full_maps(family, num_layers, num_images):
    target = build_target(family, num_layers=num_layers, attention="eager")
    prompt = build_prompt(target, num_images)
    found_T = target.prefill(prompt, target.build_cache(64), want_importance=True).importance_T
    maps_HTT = maps_of(target, prompt, num_layers // 2)
    for start, stop in prompt.image_spans:
        mass_M = expected_mass(maps_HTT, prompt, (start, stop))[start:stop]
        shares = (mass_M / mass_M.max()).float()
        torch.testing.assert_close(found_T[start:stop], shares, rtol=0, atol=1.1e-4)
        assert found_T[start:stop].max() == 1
        assert len(found_T[start:stop].unique()) > 2
    assert not found_T[~prompt.image_mask_T].any()
    steps = found_T.double() * 10_000
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)


def random_states(num_tokens=20, heads=4, kv_heads=2, size=8):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, num_tokens, size, generator=generator, dtype=torch.float64)
    k = torch.randn(kv_heads, num_tokens, size, generator=generator, dtype=torch.float64)
    return q, k


def test_mass_sums_to_one_and_leaves_the_first_token_out():
    target = build_target("llava")
    prompt = build_prompt(target, 1)
    q, k = random_states(len(prompt.input_ids_T))
    mass_IT = attention_mass(q, k, 1.0, None, prompt)
    torch.testing.assert_close(mass_IT.sum(1), torch.ones(1, dtype=torch.float64))
    assert mass_IT[0, 0] == 0
    k[:, 0] = 50 * q[::2].mean((0, 1))  # whatever the sink draws, nothing changes
    torch.testing.assert_close(attention_mass(q, k, 1.0, None, prompt), mass_IT)


def test_chunks_change_nothing(monkeypatch):
    target = build_target("llava")
    prompt = build_prompt(target, 2)
    q, k = random_states(len(prompt.input_ids_T))
    whole = attention_mass(q, k, 0.5, 9, prompt)
    monkeypatch.setattr(importance_module, "_MAX_MAP_ELEMENTS", 1)
    torch.testing.assert_close(attention_mass(q, k, 0.5, 9, prompt), whole)


def test_window_and_later_images_do_not_leak_in():
    target = build_target("llava")
    prompt = build_prompt(target, 2)
    q, k = random_states(len(prompt.input_ids_T))
    (_, first_stop), (second_start, second_stop) = prompt.image_spans
    mass_IT = attention_mass(q, k, 1.0, None, prompt)
    q2 = q.clone()
    q2[:, second_start:second_stop] += 1  # image rows are no text: their queries do not count
    torch.testing.assert_close(attention_mass(q2, k, 1.0, None, prompt), mass_IT)
    q3 = q.clone()
    q3[:, first_stop:second_start] += 1  # text between counts for the first image alone
    changed = (attention_mass(q3, k, 1.0, None, prompt) - mass_IT).abs().amax(1)
    assert changed[0] > 1e-3
    assert changed[1] == 0
    seen = attention_mass(q, k, 1.0, WINDOW, prompt)[1]
    assert not seen[: second_stop - WINDOW + 1].any()


def test_image_without_text_behind_it_has_equal_tokens():
    target = build_target("llava")
    prompt = build_prompt(target, 1)
    stop = prompt.image_spans[0][1]
    cut = target.build_inputs(prompt.input_ids_T[:stop], prompt.model_inputs)
    out = target.prefill(cut, target.build_cache(64), want_importance=True)
    assert out.importance_T is not None
    assert not out.importance_T.any()


def test_rounding_makes_near_ties_ties():
    target = build_target("llava")
    prompt = build_prompt(target, 1)
    start, stop = prompt.image_spans[0]
    mass = torch.zeros(1, len(prompt.input_ids_T), dtype=torch.float64)
    mass[0, start:stop] = 0.02
    mass[0, start + 1] += 1e-9
    rounded = round_per_image(mass, prompt)[start:stop]
    assert rounded.unique().tolist() == [1.0]


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_padded_batch_gives_the_importance_of_each_prompt_alone(family):
    target = build_target(family, num_layers=3)
    counts = (2, 0, 1)
    prompts = [build_prompt(target, n, num_text=9 + 2 * n, seed=i) for i, n in enumerate(counts)]
    alone = [
        target.prefill(p, target.build_cache(64), want_importance=True).importance_T
        for p in prompts
    ]
    assert alone[1] is None
    batch, offsets = target.collate(prompts)
    with target.capture_importance(prompts, offsets) as padded_left:
        target.model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=None)
    longest = max(len(p.input_ids_T) for p in prompts) + 2
    longer = [extend(p, [7] * (longest - len(p.input_ids_T))) for p in prompts]
    with torch.inference_mode(), target.capture_importance(prompts) as padded_right:
        target.model(**target.collate(longer)[0])
    for found in (padded_left, padded_right):
        assert len(found) == 3, "later steps of a generation must not count"
        assert found[1] is None
        for row in (0, 2):
            torch.testing.assert_close(found[row], alone[row], rtol=0, atol=0)
