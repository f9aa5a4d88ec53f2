"""A target's generation config is honoured, refused by name, or said to be left out."""

from typing import Any

import pytest
from target_models import build_prompt, build_target

from dreams_nas.core.errors import UserError
from dreams_nas.decode.engine import decode
from dreams_nas.decode.generation import require_greedy
from dreams_nas.targets.huggingface import HuggingFaceTarget


@pytest.fixture
def target() -> HuggingFaceTarget:
    return build_target("llama")


def answer(target: HuggingFaceTarget) -> list[int]:
    return decode(target, build_prompt(target), max_new_tokens=8, stop_ids=()).tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("suppress_tokens", [5]),
        ("begin_suppress_tokens", [5]),
        ("forced_eos_token_id", 2),
        ("forced_bos_token_id", 1),
        ("min_new_tokens", 4),
        ("min_length", 4),
        ("bad_words_ids", [[5, 6]]),
        ("sequence_bias", [[[5], -1.0]]),
        ("guidance_scale", 1.5),
        ("num_beams", 4),
    ],
)
def test_what_greedy_decoding_cannot_honour_is_refused_by_name(
    target: HuggingFaceTarget, name: str, value: Any
) -> None:
    setattr(target.model.generation_config, name, value)
    with pytest.raises(UserError) as caught:
        answer(target)
    message = str(caught.value)
    assert f"asks for {name} {value!r};" in message
    assert target.spec.name in message
    assert "take the setting out of generation_config.json" in message


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 1.05), ("stop_strings", ["end"])]
)
def test_what_recorded_answers_cannot_honour_is_refused_for_runs(
    target: HuggingFaceTarget, name: str, value: Any
) -> None:
    require_greedy(target)
    setattr(target.model.generation_config, name, value)
    with pytest.raises(UserError, match=name):
        require_greedy(target)


def test_values_that_change_nothing_pass(
    target: HuggingFaceTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = answer(target)
    config = target.model.generation_config
    config.repetition_penalty = config.guidance_scale = 1.0
    config.no_repeat_ngram_size = config.min_new_tokens = config.min_length = 0
    config.num_beams, config.suppress_tokens, config.token_healing = 1, [], False
    config.temperature, config.do_sample = 0.7, False
    assert answer(target) == expected
    assert capsys.readouterr().err == ""


def test_sampling_is_left_out_and_said_once(
    target: HuggingFaceTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = answer(target)
    config = target.model.generation_config
    config.do_sample, config.temperature, config.top_p = True, 0.7, 0.9
    assert [answer(target), answer(target)] == [expected, expected]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "samples (do_sample True, temperature 0.7, top_p 0.9)" in shown.err


def test_the_models_own_generate_would_differ(target: HuggingFaceTarget) -> None:
    """Why these settings are refused: transformers honours them."""
    inputs = build_prompt(target)
    ids = inputs.input_ids_T[None]
    target.model.generation_config.suppress_tokens = sorted(set(answer(target)))
    theirs = target.model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    target.model.generation_config.suppress_tokens = None
    assert theirs[0, ids.shape[1] :].tolist() != answer(target)
