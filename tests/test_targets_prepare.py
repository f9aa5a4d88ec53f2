"""Messages and images to prompts, and what is refused on the way."""

import pytest
import torch
from PIL import Image
from target_models import (
    IMAGE_TOKEN,
    build_gemma3_processor,
    build_llava_processor,
    build_model,
    build_target,
    build_tokenizer,
)

from dreams_nas.core.errors import UserError
from dreams_nas.targets.families import wrap_model
from dreams_nas.targets.prompts import load_image

USER, ASSISTANT = 80, 81
QUESTION = {"type": "text", "text": "w5 w6"}
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def llava():
    return wrap_model(build_model("llava"), build_llava_processor())


def picture(colour: str = "red", size: tuple[int, int] = (30, 20)) -> Image.Image:
    return Image.new("RGB", size, colour)


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_messages_with_images_become_a_prompt(llava, num_images):
    messages = [{"role": "user", "content": [IMAGE] * num_images + [QUESTION]}]
    images = [picture("red"), picture("blue", (12, 50))][:num_images]
    prompt = llava.prepare(messages, images)
    expected = [USER] + [IMAGE_TOKEN] * (9 * num_images) + [5, 6, ASSISTANT]
    assert prompt.input_ids_T.tolist() == expected
    assert prompt.image_spans == ((1, 10), (10, 19))[:num_images]
    assert set(prompt.model_inputs) == ({"pixel_values"} if num_images else set())
    assert llava.prefill(prompt, llava.build_cache(64)).logits_V.shape == (97,)
    if num_images == 2:
        first, second = prompt.model_inputs["pixel_values"]
        assert first[0].mean() > second[0].mean(), "red and blue were swapped"
    assert messages == [{"role": "user", "content": [IMAGE] * num_images + [QUESTION]}]


def test_image_paths_and_plain_text_are_accepted(llava, tmp_path):
    path = tmp_path / "chart.png"
    picture().save(path)
    content = [IMAGE, QUESTION]
    from_path = llava.prepare([{"role": "user", "content": content}], [path])
    from_image = llava.prepare([{"role": "user", "content": content}], [picture()])
    torch.testing.assert_close(
        from_path.model_inputs["pixel_values"], from_image.model_inputs["pixel_values"]
    )
    prompt = llava.prepare([{"role": "user", "content": "w5 w6"}])
    assert prompt.input_ids_T.tolist() == [USER, 5, 6, ASSISTANT]


@pytest.mark.parametrize(("num_places", "num_images"), [(0, 1), (1, 0), (2, 1)])
def test_images_and_places_must_match(llava, num_places, num_images):
    messages = [{"role": "user", "content": [IMAGE] * num_places + [QUESTION]}]
    match = f"{num_places} image entries, but {num_images} images"
    with pytest.raises(UserError, match=match):
        llava.prepare(messages, [picture()] * num_images)


def test_processor_that_does_not_fit_the_tower_is_refused():
    target = wrap_model(build_model("llava"), build_llava_processor(patch_size=6))
    with pytest.raises(UserError) as caught:
        target.prepare([{"role": "user", "content": [IMAGE, QUESTION]}], [picture()])
    assert "4 image tokens, but its 1 images yield 9 visual features" in str(caught.value)
    assert "30 x 20" in str(caught.value)


def test_placeholder_inside_a_text_is_refused(llava):
    with pytest.raises(UserError, match="'<image>', which stands for an image"):
        llava.prepare([{"role": "user", "content": "w5 <image> w6"}])


def test_prompt_longer_than_the_positions_is_refused(llava):
    with pytest.raises(UserError, match=r"513 tokens, but .* has 512 positions"):
        llava.prepare([{"role": "user", "content": "w5 " * 511}])
    prompt = llava.prepare([{"role": "user", "content": "w5 " * 510}])
    assert len(prompt.input_ids_T) == 512


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_gemma3_gets_its_token_types(num_images):
    target = wrap_model(build_model("gemma3"), build_gemma3_processor())
    messages = [{"role": "user", "content": [IMAGE, QUESTION] * num_images or [QUESTION]}]
    prompt = target.prepare(messages, [picture()] * num_images)
    block = [83] + [IMAGE_TOKEN] * 4 + [84, 5, 6]
    assert prompt.input_ids_T.tolist() == [USER] + (block * num_images or [5, 6]) + [ASSISTANT]
    assert prompt.image_spans == ((2, 6), (10, 14))[:num_images]
    types_T = prompt.model_inputs["token_type_ids"][0]
    assert torch.equal(types_T == 1, prompt.input_ids_T == IMAGE_TOKEN)
    assert target.prefill(prompt, target.build_cache(64)).logits_V.shape == (97,)


def test_text_target_reads_text_alone():
    target = wrap_model(build_model("llama"), tokenizer=build_tokenizer())
    messages = [{"role": "user", "content": [QUESTION]}]
    assert target.prepare(messages).input_ids_T.tolist() == [USER, 5, 6, ASSISTANT]
    with pytest.raises(UserError, match="reads text only, but 1 images"):
        target.prepare([{"role": "user", "content": [IMAGE, QUESTION]}], [picture()])


def test_missing_chat_template_is_an_error():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    target = wrap_model(build_model("llama"), tokenizer=tokenizer)
    with pytest.raises(UserError, match="no chat template"):
        target.prepare([{"role": "user", "content": "w5"}])


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_other_media_are_refused(llava, kind):
    with pytest.raises(UserError, match=kind):
        llava.prepare([{"role": "user", "content": [{"type": kind}, QUESTION]}])


def test_file_that_is_no_image_is_named(tmp_path):
    fake, cut = tmp_path / "fake.png", tmp_path / "cut.png"
    fake.write_text("not an image")
    picture(size=(64, 64)).save(cut)
    cut.write_bytes(cut.read_bytes()[:90])
    for path, words in ((fake, "not a readable image"), (cut, "not a readable image")):
        with pytest.raises(UserError, match=words) as caught:
            load_image(path)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="no such image file"):
        load_image(tmp_path / "gone.png")
    with pytest.raises(UserError):
        load_image(tmp_path)


def test_decode_text_leaves_special_tokens_out(llava):
    assert llava.decode_text([5, 2, 6]) == "w5 w6"
    with pytest.raises(UserError, match="without a tokenizer"):
        build_target("llama").decode_text([5])
