"""Answers and features in batches equal those of one sample alone, for every family."""

from collections.abc import Sequence

import pytest
import torch
from feature_data import NUM_IMAGE_TOKENS, build_llava, conversation, conversations
from PIL import Image
from target_models import FAMILIES, IMAGE_TOKEN, build_prompt, build_target
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.features.answers import cut_at_end, generate_answers, split_batches
from dreams_nas.features.conversations import Conversation
from dreams_nas.features.passes import record_features
from dreams_nas.features.prompts import read_prompt
from dreams_nas.features.recording import Recording
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs

LAYERS = (0, 1)


def prompts_of(target: HuggingFaceTarget, samples: Sequence[Conversation]) -> list[TargetInputs]:
    read = [read_prompt(target, sample, 500)[1] for sample in samples]
    return [prompt for prompt in read if prompt is not None]


def record(
    target: HuggingFaceTarget, prompts: Sequence[TargetInputs], answers: Sequence[Tensor]
) -> list[Recording]:
    ids = [str(index) for index in range(len(prompts))]
    return record_features(target, ids, prompts, answers, LAYERS)


def assert_equal(a: Recording, b: Recording, tolerance: float) -> None:
    torch.testing.assert_close(a.features_TF, b.features_TF, rtol=0, atol=tolerance)
    torch.testing.assert_close(a.image_embeddings_MD, b.image_embeddings_MD, rtol=0, atol=tolerance)
    assert a.tokens_T.tolist() == b.tokens_T.tolist()
    torch.testing.assert_close(a.importance_M, b.importance_M, rtol=0, atol=1.5e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)], ids=["fp32", "fp64"]
)
def test_a_sample_is_the_same_alone_in_a_batch_and_again(
    dtype: torch.dtype, tolerance: float
) -> None:
    target = build_llava(dtype)
    prompts = prompts_of(target, conversations(12))
    answers = generate_answers(target, prompts, 10)
    batch, again = record(target, prompts, answers), record(target, prompts, answers)
    for index, prompt in enumerate(prompts):
        [alone] = record(target, [prompt], [answers[index]])
        assert_equal(batch[index], alone, tolerance)
        assert torch.equal(batch[index].features_TF, again[index].features_TF)
    # The order of the batch is the order of the result: reversed in, reversed out.
    turned = record(target, prompts[::-1], answers[::-1])[::-1]
    for one, other in zip(batch, turned, strict=True):
        assert_equal(one, other, tolerance)
    firsts = torch.stack([recording.features_TF[-1] for recording in batch])
    assert (torch.cdist(firsts, firsts) + 100 * torch.eye(12) > 0.01).all()


def test_features_are_those_of_a_plain_forward() -> None:
    target = build_llava(torch.float64)
    prompts = prompts_of(target, [conversation(3, num_images=2, num_words=5)])
    answers = generate_answers(target, prompts, 6)
    [recording] = record(target, prompts, answers)
    last: list[Tensor] = []
    handle = target.decoder.layers[-1].register_forward_hook(lambda *a: last.append(a[2]))
    output = target.model(
        input_ids=recording.tokens_T[None],
        pixel_values=prompts[0].model_inputs["pixel_values"],
        output_hidden_states=True,
    )
    handle.remove()
    plain = torch.cat([output.hidden_states[1][0], last[0][0]], dim=1)
    torch.testing.assert_close(recording.features_TF, plain, rtol=0, atol=1e-12)
    # The last one is taken before the final norm, so the target's head gives its logits.
    logits = target.head(recording.features((1,)))
    torch.testing.assert_close(logits, output.logits[0], rtol=0, atol=1e-12)
    is_image_T = recording.tokens_T == IMAGE_TOKEN
    assert is_image_T.sum() == 2 * NUM_IMAGE_TOKENS
    embeddings = output.hidden_states[0][0][is_image_T]
    torch.testing.assert_close(recording.image_embeddings_MD, embeddings, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_records_what_its_prefill_yields(family: str) -> None:
    target = build_target(family)
    # A random model may write the image token, of which a second pass would ask an image.
    target.head_weight_VD.data[IMAGE_TOKEN] = 0
    counts = (0,) if family == "llama" else (1, 0, 2)
    prompts = [
        build_prompt(target, counts[n % len(counts)], num_text=10 + 3 * (n % 2), seed=n)
        for n in range(5)
    ]
    answers = generate_answers(target, prompts, 9)
    for prompt, answer, recording in zip(
        prompts, answers, record(target, prompts, answers), strict=True
    ):
        cache = target.build_cache(len(prompt.input_ids_T) + 1)
        read = target.prefill(prompt, cache, target_layer_ids=LAYERS, want_importance=True)
        stop = recording.prompt_length
        features_TF = recording.features_TF[:stop]
        torch.testing.assert_close(features_TF, read.features_TF, rtol=0, atol=1e-10)
        if prompt.image_mask_T is not None:
            assert read.importance_T is not None
            embeddings_MD = read.embeddings_TD[prompt.image_mask_T]
            torch.testing.assert_close(recording.image_embeddings_MD, embeddings_MD)
            expected_M = read.importance_T[prompt.image_mask_T]
            torch.testing.assert_close(recording.importance_M, expected_M, rtol=0, atol=1.5e-4)
        # The target's own next token at every answer position, the first one included.
        rows = slice(stop - 1, len(recording.tokens_T) - 1)
        own = target.head(recording.features((1,))[rows]).argmax(-1)
        assert own.tolist() == answer.tolist() == recording.tokens_T[stop:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_greedy_ones_of_a_sample_alone(family: str) -> None:
    target = build_target(family)
    prompts = [build_prompt(target, n % 2 * (family != "llama"), seed=n) for n in range(4)]
    # An end token that comes up on the way, so that answers end at different places.
    [probe] = generate_answers(target, prompts[:1], 4)
    target.spec = target.spec.replace(eos_token_ids=(int(probe[-1]), 95))
    answers = generate_answers(target, prompts, 12)
    assert len(answers[0]) <= 4
    assert int(answers[0][-1]) == int(probe[-1])
    for prompt, answer in zip(prompts, answers, strict=True):
        cache = target.build_cache(len(prompt.input_ids_T) + 13)
        token = target.prefill(prompt, cache).logits_V.argmax()
        tokens = [int(token)]
        while len(tokens) < 12 and tokens[-1] not in target.spec.eos_token_ids:
            step = target.verify(token[None], torch.zeros(1, dtype=torch.int64), None, cache)
            cache.commit([0])
            token = step.logits_QV[0].argmax()
            tokens.append(int(token))
        assert answer.tolist() == tokens
        assert [generate_answers(target, [prompt], 12)[0].tolist()] == [tokens]


def test_generation_defaults_of_a_checkpoint_do_not_change_answers() -> None:
    target = build_llava(torch.float64)
    prompts = prompts_of(target, conversations(3))
    plain = [answer.tolist() for answer in generate_answers(target, prompts, 8)]
    defaults = target.model.generation_config
    defaults.repetition_penalty, defaults.do_sample, defaults.temperature = 5.0, True, 3.0
    defaults.suppress_tokens = [plain[0][0]]
    assert [answer.tolist() for answer in generate_answers(target, prompts, 8)] == plain
    assert target.model.generation_config is defaults


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_image_tokens_are_counted_before_any_pass(num_images: int) -> None:
    target = build_llava()
    sample = conversation(1, num_images)
    [prompt] = prompts_of(target, [sample])
    assert int((prompt.input_ids_T == IMAGE_TOKEN).sum()) == num_images * NUM_IMAGE_TOKENS
    assert len(prompt.image_spans) == num_images
    assert target.processor is not None
    target.processor.num_additional_image_tokens = 0
    if num_images:
        with pytest.raises(UserError, match=r"sample 'c1': .*image tokens.*visual features"):
            read_prompt(target, sample, 500)
    more = Conversation("c1", sample.messages, (*sample.images, Image.new("RGB", (4, 4))))
    with pytest.raises(UserError, match=r"sample 'c1': .*image"):
        read_prompt(target, more, 500)


def test_answers_are_cut_behind_their_first_end() -> None:
    assert cut_at_end(torch.tensor([5, 7, 2, 9, 2]), (2, 9)).tolist() == [5, 7, 2]
    assert cut_at_end(torch.tensor([2]), (2,)).tolist() == [2]
    assert cut_at_end(torch.tensor([5, 7]), (2,)).tolist() == [5, 7]
    assert cut_at_end(torch.tensor([5, 7]), ()).tolist() == [5, 7]


def test_batches_keep_the_order_and_the_budget() -> None:
    lengths = [3, 4, 4, 9, 2, 2, 2, 30, 1]
    batches = split_batches(range(9), lengths, 12)
    assert batches == [[0, 1, 2], [3], [4, 5, 6], [7], [8]]
    assert split_batches([], [], 12) == []
