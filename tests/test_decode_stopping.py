"""Where answers end, and the text of what is committed."""

from collections.abc import Sequence
from typing import Any

import pytest
from draft_models import TREES, build_loud_target, build_ready
from target_models import build_prompt, build_tokenizer

from dreams_nas.decode.engine import build_plan, decode
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.decode.stopping import StopStrings, TextStream, cut_text
from dreams_nas.space.arch import DraftArch
from dreams_nas.targets.embedded.tokens import build_tokenizer as build_byte_tokenizer

WORDS = ["ab", "c", "ca", " ", "b", "abc", "\n"]


def letters(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "stops", "kept"),
    [
        ([0, 1, 4], ["bc"], 2),  # ab|c: across a border
        ([0, 1, 4], ["abcb"], 3),
        ([5, 1], ["b"], 1),  # inside a token
        ([0, 1, 4], ["x"], None),
        ([2, 3, 0], ["a a"], 3),
        ([0, 0, 1], ["bab", "c"], 2),  # the first that is complete
        ([1, 2], ["cc", "cca"], 2),
        ([], ["a"], None),
    ],
)
def test_stop_strings_are_found_across_tokens(
    tokens: list[int], stops: list[str], kept: int | None
) -> None:
    whole = StopStrings(stops, letters)
    assert whole.find(tokens) == kept
    one_by_one = StopStrings(stops, letters)
    found = [one_by_one.find([token]) for token in tokens]
    assert next((i + 1 for i, x in enumerate(found) if x is not None), None) == kept


def test_a_text_is_cut_behind_the_first_stop_string() -> None:
    assert cut_text("one two three", ["two", "three"]) == "one two"
    assert cut_text("one two", ["x"]) == "one two"
    assert cut_text("one two", []) == "one two"


@pytest.mark.parametrize("text", ["naïve café ☕ 🙂🙂 e\u0301", "plain words, 12 of them.", "🙂"])
def test_text_comes_as_it_would_at_once(text: str) -> None:
    """Characters of several byte tokens are held back until they are whole."""
    tokenizer = build_byte_tokenizer(num_charts=20)
    tokens = tokenizer.encode(text)
    stream = TextStream(lambda ids: tokenizer.decode(list(ids)))
    pieces = [stream.push(token) for token in tokens]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 2


def test_an_unfinished_character_comes_at_the_end() -> None:
    tokenizer = build_byte_tokenizer(num_charts=20)
    tokens = tokenizer.encode("a 🙂")[:-1]
    stream = TextStream(lambda ids: tokenizer.decode(list(ids)))
    text = "".join(stream.push(token) for token in tokens)
    assert "\ufffd" not in text
    assert text + stream.finish() == tokenizer.decode(tokens)


@pytest.mark.parametrize("tree", [None, *TREES])
def test_a_stop_string_ends_the_answer_at_every_place(tree: str | None) -> None:
    target = build_loud_target("llava")
    target.tokenizer = build_tokenizer()
    inputs = build_prompt(target, 1)
    answer = decode(target, inputs, max_new_tokens=20, stop_ids=()).tokens
    draft: dict[str, Any] = {}
    if tree is not None:
        ready = build_ready(target, DraftArch(tap="last", depth=1))
        draft = {"draft": ready, "plan": build_plan(TREES[tree], target)}
    for count in range(2, 12):
        stop = target.decode_text(answer[count - 2 : count])
        first = next(
            n for n in range(1, 21) if stop in target.decode_text(answer[:n])
        )  # it may stand earlier, too
        result = decode(
            target,
            inputs,
            max_new_tokens=20,
            stop_ids=(),
            settings=GenerationSettings(stop_strings=(stop,)),
            **draft,
        )
        assert result.tokens == answer[:first]
        assert result.stopped
    never = GenerationSettings(stop_strings=("nowhere",))
    whole = decode(target, inputs, max_new_tokens=20, stop_ids=(), settings=never, **draft)
    assert whole.tokens == answer
    assert not whole.stopped
