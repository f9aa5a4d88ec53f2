"""Where an answer ends, and its text as it comes: end tokens, stop strings, the token limit."""

from collections.abc import Callable, Sequence

DecodeText = Callable[[Sequence[int]], str]
"""Tokens to text."""
_UNFINISHED = "\ufffd"
"""What a tokenizer shows for a character whose bytes have not all come."""


def cut_at_stop(
    tokens: Sequence[int], num_before: int, limit: int, stop_ids: frozenset[int]
) -> tuple[list[int], bool]:
    """End a block of new tokens exactly at the first end token or at the limit.

    Args:
        tokens: New tokens.
        num_before: Tokens generated before them.
        limit: Tokens allowed in all.
        stop_ids: End tokens; the one that ends the answer belongs to it.

    Returns:
        The tokens that count, and whether the answer ends with them.
    """
    kept = list(tokens[: limit - num_before])
    for index, token in enumerate(kept):
        if token in stop_ids:
            return kept[: index + 1], True
    return kept, num_before + len(kept) >= limit


class TextStream:
    """Text of tokens as they come, the same in the end as that of all at once.

    A token is read together with the one or few before it, because its text may depend on them
    (spaces, characters of several bytes); nothing older is looked at again. Where an answer breaks
    off inside a character, tokenizers with byte fallback may show another number of replacement
    signs for it than all at once.
    """

    def __init__(self, decode_text: DecodeText) -> None:
        self._decode = decode_text
        self._known: list[int] = []
        """Tokens whose text is out, as far back as the next ones need."""
        self._waiting: list[int] = []
        """Tokens of an unfinished character."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty inside a character."""
        self._waiting.append(token)
        text = self._text()
        if text.endswith(_UNFINISHED):
            return ""
        return self._release(text)

    def finish(self) -> str:
        """What is left of an unfinished character."""
        return self._release(self._text()) if self._waiting else ""

    def _text(self) -> str:
        before, whole = self._decode(self._known), self._decode(self._known + self._waiting)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._waiting)

    def _release(self, text: str) -> str:
        if text:
            self._known, self._waiting = self._waiting, []
        else:  # a special token: no text of its own, and none to lean on
            self._known, self._waiting = self._known + self._waiting, []
        return text


class StopStrings:
    """Looks for stop strings in an answer's text, across the borders of tokens."""

    def __init__(self, stops: Sequence[str], decode_text: DecodeText) -> None:
        self._stops = tuple(stops)
        self._stream = TextStream(decode_text)
        self._tail = ""
        self._longest = max(map(len, self._stops), default=0)

    def find(self, tokens: Sequence[int]) -> int | None:
        """How many of the next tokens the answer keeps; None when it goes on.

        The token that completes a stop string is the last one.
        """
        for index, token in enumerate(tokens):
            text = self._tail + self._stream.push(token)
            if any(stop in text for stop in self._stops):
                return index + 1
            self._tail = text[max(0, len(text) - self._longest + 1) :]
        return None


def cut_text(text: str, stops: Sequence[str]) -> str:
    """A text up to the end of the first stop string in it; all of it without one."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
