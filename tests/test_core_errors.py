"""The words of error messages."""

import pytest

from dreams_nas.core.errors import RunError, UserError, nearest, unknown_error, unknown_message


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dephts", "depth"), ("Keep_Ratio", "keep_ratio"), ("zzz", None), ("", None)],
)
def test_nearest_finds_slips_and_nothing_else(name: str, expected: str | None) -> None:
    assert nearest(name, ["depth", "keep_ratio", "vocab"]) == expected


def test_unknown_message_names_value_place_guess_and_choices() -> None:
    message = unknown_message("family", "lava", ["llava", "gemma3"], "config.json")
    assert (
        message
        == "unknown family 'lava' in config.json (did you mean 'llava'?); choices: llava, gemma3"
    )


def test_unknown_message_without_a_close_choice_has_no_guess() -> None:
    assert unknown_message("verb", "qqq", ["run"]) == "unknown verb 'qqq'; choices: run"


def test_user_errors_are_value_errors_and_run_errors_are_not() -> None:
    assert isinstance(unknown_error("x", "y", []), UserError)
    assert issubclass(UserError, ValueError)
    assert not issubclass(RunError, ValueError)
