"""The embedded target as shipped: its shape, its files, and that it answers."""

from functools import cache
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlavaForConditionalGeneration

from dreams_nas.targets.embedded import embedded_target_path
from dreams_nas.targets.embedded.evaluate import generate_answers, load_target
from dreams_nas.targets.embedded.generator import build_example, user_message
from dreams_nas.targets.embedded.scoring import Score
from dreams_nas.targets.embedded.tokens import CHAT_TEMPLATE, VOCABULARY_SIZE

FOLDER = embedded_target_path()


@cache
def _target() -> tuple[LlavaForConditionalGeneration, Any]:
    return load_target(FOLDER)


def _answer(messages: list[dict[str, Any]], images: list[Any]) -> tuple[str, int]:
    """Return the greedy answer and the number of image tokens in the prompt."""
    model, processor = _target()
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=images or None, text=text, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=160)
    num_images = int((inputs["input_ids"] == processor.image_token_id).sum())
    new = ids[0, inputs["input_ids"].shape[1] :]
    return processor.decode(new, skip_special_tokens=True).strip(), num_images


def test_the_folder_is_small_and_complete() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 15_000_000
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "values_within_one" in card


def test_weights_are_stored_in_bf16_and_loaded_in_fp32() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert {p.dtype for p in _target()[0].parameters()} == {torch.float32}


def test_the_shape_is_that_of_the_design() -> None:
    config = _target()[0].config
    text, vision = config.text_config, config.vision_config
    assert (text.num_hidden_layers, text.hidden_size, text.intermediate_size) == (8, 192, 512)
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (8, 4, 24)
    assert text.vocab_size == VOCABULARY_SIZE == 4096
    assert text.max_position_embeddings >= 1024
    assert (vision.image_size, vision.patch_size) == (96, 12)
    processor = _target()[1]
    assert processor.chat_template == CHAT_TEMPLATE
    assert len(processor.tokenizer) == VOCABULARY_SIZE


def test_the_card_tells_the_truth() -> None:
    """Shares on unseen tables, measured again on fewer answers, agree with the card's."""
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    score = Score()
    asked = [build_example("score", i, seed=3) for i in range(48)]
    for example, answer in zip(asked, generate_answers(*_target(), asked), strict=True):
        score.add(example, answer)
    shares = score.report()
    for name in ("names", "colours", "values_within_one"):
        line = next(text for text in card.splitlines() if text.startswith(f"| {name}"))
        told, found = float(line.split("|")[2]), shares[name]
        assert found is not None
        # 48 answers hold some 150 facts of a kind, several from one answer.
        assert found == pytest.approx(told, abs=0.15)


def test_an_answer_is_the_same_alone_and_in_a_batch() -> None:
    asked = [build_example("choose", i, seed=4) for i in range(3)]
    batched = generate_answers(*_target(), asked)
    assert batched == [generate_answers(*_target(), [example])[0] for example in asked]


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_prompts_with_any_number_of_images_are_answered(num_images: int) -> None:
    example = build_example("choose", 1)
    message = user_message(example.question, num_images)
    answer, num_tokens = _answer([message], [example.image] * num_images)
    assert num_tokens == 64 * num_images
    assert answer.endswith(".")


def test_a_second_turn_is_answered_about_the_same_chart() -> None:
    example = build_example("choose", 2)
    name = example.chart.names[0]
    said = {"role": "assistant", "content": example.answer}
    again = user_message("What does the chart show?", num_images=0)
    answer, num_tokens = _answer([user_message(example.question), said, again], [example.image])
    assert num_tokens == 64
    assert name in answer
