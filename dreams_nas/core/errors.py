"""The two errors a user meets, and the words they share.

`UserError` means the input can be corrected (exit code 2), `RunError` that a run failed although
its input was fine (exit code 1). Broken invariants of our own are assertions.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Wrong input: the message names the thing, the value, the rule and the way out."""


class RunError(RuntimeError):
    """A run failed for a reason outside its input, such as a full disk or a mismatch."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `name` was most likely meant to be, or None if none is close."""
    by_lowercase = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(name.lower(), list(by_lowercase), n=1, cutoff=0.6)
    return by_lowercase[matches[0]] if matches else None


def unknown_message(kind: str, name: object, choices: Iterable[object], where: str = "") -> str:
    """Build "unknown KIND 'name' in WHERE (did you mean 'x'?); choices: a, b".

    Args:
        kind: What `name` should have been, e.g. "config key" or "family".
        name: The value that was given.
        choices: Everything that would have been accepted.
        where: The file or section that held it, if known.
    """
    texts = [str(choice) for choice in choices]
    guess = nearest(str(name), texts)
    place = f" in {where}" if where else ""
    hint = f" (did you mean '{guess}'?)" if guess is not None else ""
    return f"unknown {kind} '{name}'{place}{hint}; choices: {', '.join(texts) or 'none'}"


def unknown_error(kind: str, name: object, choices: Iterable[object], where: str = "") -> UserError:
    """Return (not raise) the `UserError` that carries `unknown_message`."""
    return UserError(unknown_message(kind, name, choices, where))
