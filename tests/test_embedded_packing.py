"""Training sequences of the embedded target: what each token sees, learns and means.

Shapes: B sequences, T tokens.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from dreams_nas.targets.embedded.charts import COLOUR_NAMES, KINDS, build_chart, draw_chart
from dreams_nas.targets.embedded.generator import build_example, user_message
from dreams_nas.targets.embedded.learning import answer_states, image_features
from dreams_nas.targets.embedded.model import build_config, build_model
from dreams_nas.targets.embedded.packing import (
    NO_LABEL,
    Packer,
    TrainingBatch,
    attention_mask,
    patch_targets_of,
    to_pixels,
)
from dreams_nas.targets.embedded.tokens import NUM_IMAGE_TOKENS, build_processor, build_tokenizer


@cache
def _processor() -> LlavaProcessor:
    return build_processor(build_tokenizer(num_charts=100))


@cache
def _model() -> LlavaForConditionalGeneration:
    """A target of two layers with random weights, in fp64."""
    torch.manual_seed(0)
    config = build_config(_processor().tokenizer)
    config.text_config.num_hidden_layers = 2
    config.vision_config.num_hidden_layers = 1
    return build_model(config).double().eval()


def _batch(first: int = 0, count: int = 2, max_tokens: int = 400) -> TrainingBatch:
    return Packer(_processor().tokenizer, max_tokens, seed=0).batch(
        "train", range(first, first + count)
    )


def _logits(batch: TrainingBatch) -> torch.Tensor:
    """Return logits at the supervised positions."""
    features = image_features(_model(), batch.pixels.double())
    with torch.no_grad():
        states = answer_states(_model(), batch, features)[-1][batch.labels != NO_LABEL]
        logits: torch.Tensor = _model().lm_head(states)
    return logits


def test_pixels_equal_those_of_the_image_processor() -> None:
    image = draw_chart(build_chart("train", 0))
    wanted = _processor().image_processor(images=[image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(to_pixels([image]), wanted)


def test_a_packed_conversation_reads_as_the_processor_writes_it() -> None:
    """Prefix + first conversation = chat template, expanded image tokens and answer."""
    packer = Packer(_processor().tokenizer, 400, seed=0)
    chart, with_image, rows = packer.sequence("train", 3)
    assert with_image
    ids, groups = rows[0], rows[2]
    said = _processor().tokenizer.decode(ids[groups <= 1])
    question, answer = said.split("<image>")[-1].split("<assistant>")[:2]
    answer = answer.split("<eos>")[0]
    messages = [user_message(question.strip()), {"role": "assistant", "content": answer.strip()}]
    text = _processor().apply_chat_template(messages)
    inputs = _processor()(images=[draw_chart(chart)], text=text, return_tensors="pt")
    wanted = inputs["input_ids"][0].tolist()
    assert wanted.count(_processor().image_token_id) == NUM_IMAGE_TOKENS
    assert ids[groups <= 1].tolist()[: len(wanted)] == wanted


def test_the_answer_and_its_end_are_learned_and_nothing_else() -> None:
    batch = _batch()
    tokenizer = _processor().tokenizer
    end, assistant = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<assistant>")
    for ids, labels, groups in zip(batch.ids, batch.labels, batch.groups, strict=True):
        for group in range(1, int(groups.max()) + 1):
            tokens, wanted = ids[groups == group].tolist(), labels[groups == group].tolist()
            answering = False
            for at, token in enumerate(tokens):
                answering = (answering or token == assistant) and token != end
                # the label stands where the token before is read, the first answer token included
                assert wanted[at] == (tokens[at + 1] if answering else NO_LABEL)
        assert bool((labels[groups <= 0] == NO_LABEL).all())


def test_the_probe_is_told_the_mark_that_comes_next() -> None:
    tokenizer = _processor().tokenizer
    chart, _, rows = Packer(tokenizer, 400, seed=0).sequence("train", 1)
    labels, places, colours, values = rows[1], *rows[8:11]
    assert (labels[places != NO_LABEL] != NO_LABEL).all()
    said: dict[int, set[str]] = {}
    for label, place, colour, value in zip(labels, places, colours, values, strict=True):
        if place == NO_LABEL:
            assert colour == value == NO_LABEL
            continue
        assert (COLOUR_NAMES[colour], value) == (chart.colours[place], chart.values[place])
        said.setdefault(int(place), set()).add(tokenizer.decode([label]))
    for place, tokens in said.items():
        assert f" {chart.values[place]}" in tokens
        assert tokens <= {
            tokenizer.decode([token])
            for word in (chart.names[place], chart.colours[place], str(chart.values[place]))
            for token in tokenizer.encode(f" {word}")
        }
    assert len(said) == len(chart.names)


@pytest.mark.parametrize("with_image", [True, False])
def test_names_of_the_prompt_know_their_mark(with_image: bool) -> None:
    tokenizer = _processor().tokenizer
    packer = Packer(tokenizer, 400, seed=0)
    index = next(i for i in range(200) if packer.sequence("train", i)[1] == with_image)
    chart, _, rows = packer.sequence("train", index)
    ids, groups, numbers, known = rows[0], rows[2], rows[6], rows[11:]
    ends = np.flatnonzero((groups == 0) & (known[0] != NO_LABEL))
    assert known[0, ends].tolist() == list(range(len(chart.names)))
    for end, name, colour, value in zip(
        ends, chart.names, chart.colours, chart.values, strict=True
    ):
        number = numbers[end]
        assert tokenizer.decode(ids[number + 1 : end + 1]) == f" {name}"
        assert tokenizer.decode([ids[number]]) == f" {known[0, end] + 1}"
        seen = [COLOUR_NAMES.index(colour), value] if with_image else [NO_LABEL, NO_LABEL]
        assert known[1:, end].tolist() == seen
    assert ((numbers != NO_LABEL) <= (groups == 0)).all()


def test_a_name_in_a_question_is_matched_with_the_list() -> None:
    batch = _batch(count=4)
    found = batch.matches != NO_LABEL
    assert found.any()
    assert (batch.labels[found] == NO_LABEL).all()
    assert (batch.groups[found] > 0).all()
    rows, at = torch.nonzero(found)[:, 0], batch.matches[found]
    assert torch.equal(batch.ids[rows, at], batch.ids[found])
    assert (batch.groups[rows, at] == 0).all()
    ends = found & (batch.known[..., 0] != NO_LABEL)
    rows, at = torch.nonzero(ends)[:, 0], batch.matches[ends]
    assert torch.equal(batch.known[rows, at, 0], batch.known[ends][:, 0])
    assert (batch.known[ends][:, 1:] == NO_LABEL).all()


def test_an_answer_looks_where_its_question_names_the_mark() -> None:
    batch = _batch(count=8)
    found = batch.asked != NO_LABEL
    assert found.any()
    rows, at = torch.nonzero(found)[:, 0], batch.asked[found]
    assert torch.equal(batch.groups[rows, at], batch.groups[found])
    assert torch.equal(batch.known[rows, at, 0], batch.told[found][:, 0])
    assert (batch.labels[rows, at] == NO_LABEL).all()
    assert (at < torch.nonzero(found)[:, 1]).all()


def test_conversations_do_not_see_each_other() -> None:
    batch = _batch()
    before = _logits(batch)
    changed = batch.ids.clone()
    changed[batch.groups == 2] = 77
    after = _logits(replace(batch, ids=changed))
    of_second = (batch.groups == 2)[batch.labels != NO_LABEL]
    torch.testing.assert_close(after[~of_second], before[~of_second])
    assert not torch.allclose(after[of_second], before[of_second])


def test_a_packed_conversation_equals_the_conversation_alone() -> None:
    batch = _batch(first=3, count=1)
    packed = _logits(batch)
    for group in range(1, int(batch.groups.max()) + 1):
        keep = (batch.groups[0] == 0) | (batch.groups[0] == group)
        features = batch.pixels.double()
        with torch.no_grad():
            alone = _model()(input_ids=batch.ids[:, keep], pixel_values=features).logits
        supervised = batch.labels[0, keep] != NO_LABEL
        of_group = (batch.groups == group)[batch.labels != NO_LABEL]
        torch.testing.assert_close(packed[of_group], alone[0, supervised])


def test_padding_changes_nothing() -> None:
    together = _batch(first=0, count=4)
    lengths = (together.groups >= 0).sum(1)
    shortest = int(lengths.argmin())
    assert lengths[shortest] < together.ids.shape[1]
    alone = _batch(first=shortest, count=1)
    of_shortest = (torch.arange(4)[:, None] == shortest).expand_as(together.ids)
    all_logits = _logits(together)
    chosen = of_shortest[together.labels != NO_LABEL]
    torch.testing.assert_close(all_logits[chosen], _logits(alone))


def test_the_mask_is_causal() -> None:
    groups = torch.tensor([[0, 0, 1, 1, 2, -1]])
    allowed = (attention_mask(groups)[0, 0] == 0).int().tolist()
    assert allowed == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_some_sequences_have_no_image_and_say_the_values_instead() -> None:
    packer = Packer(_processor().tokenizer, 200, seed=0)
    built = [packer.sequence("train", i) for i in range(120)]
    without = [(chart, rows) for chart, with_image, rows in built if not with_image]
    assert 2 <= len(without) <= 20
    for chart, rows in without:
        text = _processor().tokenizer.decode(rows[0][rows[2] == 0])
        assert "<image>" not in text
        assert f"{chart.names[0]} in {chart.colours[0]} at {chart.values[0]}" in text


def test_a_batch_without_any_image_has_empty_pictures() -> None:
    packer = Packer(_processor().tokenizer, 200, seed=0)
    index = next(i for i in range(200) if not packer.sequence("train", i)[1])
    batch = packer.batch("train", range(index, index + 1))
    assert batch.pixels.shape == (0, 3, 96, 96)
    assert torch.isfinite(_logits(batch)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_patch_targets_follow_the_marks(kind: str) -> None:
    chart = next(c for c in (build_chart("train", i) for i in range(200)) if c.kind == kind)
    targets = patch_targets_of(chart).reshape(8, 8, 4)
    along = targets[:, 0] if kind == "rows" else targets[0]
    assert sorted(set(along[:, 0])) == list(range(len(chart.names)))
    assert np.array_equal(along[:, 0], np.sort(along[:, 0]))
    for place, colour, value, found in along:
        assert COLOUR_NAMES[colour] == chart.colours[place]
        assert value == chart.values[place]
        assert KINDS[found] == kind


def test_every_level_is_one_token_and_some_names_are_several() -> None:
    tokenizer = _processor().tokenizer
    assert all(len(tokenizer.tokenize(f" {level}")) == 1 for level in range(21))
    names = {n for i in range(30) for n in build_example("test", i).chart.names}
    assert sum(len(tokenizer.tokenize(f" {name}")) > 1 for name in names) > len(names) / 4
