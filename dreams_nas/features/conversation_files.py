"""Files of conversations: JSON Lines or JSON, messages of Hugging Face or turns of LLaVA.

The target answers itself, so answers in the data are not read: an assistant's turn at the end is
dropped, and of LLaVA's question-and-answer pairs the first question is taken.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json, read_text

IMAGE_MARKER = "<image>"
"""Stands for an image inside text, as in the data of LLaVA."""

_KEYS = ("id", "image", "images", "messages", "conversations")
_ROLES = ("system", "user", "assistant")
_LLAVA_ROLES = {"system": "system", "human": "user", "user": "user"}


@dataclass(frozen=True)
class ParsedConversation:
    """One entry of a file, checked."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[str, ...]
    """Paths as written in the file."""
    origin: str


class _EntryError(ValueError):
    """A rule that an entry breaks; the caller knows where the entry is."""


def parse_file(path: Path, count: int | None = None) -> Iterator[ParsedConversation]:
    """Parse the first `count` entries of a file (all by default).

    Raises:
        UserError: Names the file, the line or entry, the id, and the rule.
    """
    for number, (place, entry) in enumerate(_entries(path)):
        if number == count:
            return
        name = f", sample '{entry['id']}'" if isinstance(entry, dict) and "id" in entry else ""
        try:
            yield _parse_entry(entry, f"{path.stem}-{number}", place)
        except _EntryError as error:
            raise UserError(f"{place}{name}: {error}") from error


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        data = read_json(path)
        if not isinstance(data, list):
            raise UserError(f"{path}: should hold a list of conversations; one a line is .jsonl")
        for number, entry in enumerate(data, 1):
            yield f"{path}, entry {number}", entry
    elif path.suffix == ".jsonl":
        # Not splitlines(): JSON text may hold other separators of lines unescaped.
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                place = f"{path}:{number}"
                try:
                    yield place, json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{place}: is not valid JSON ({error})") from error
    else:
        raise UserError(
            f"{path}: conversations are read from .jsonl or .json files, or by a name such as "
            "embedded:train"
        )


def _parse_entry(entry: Any, default_id: str, place: str) -> ParsedConversation:
    if not isinstance(entry, dict):
        raise _EntryError("should be an object with 'images' and 'messages'")
    if ("messages" in entry) == ("conversations" in entry):
        raise _EntryError(
            f"should have either 'messages' or 'conversations'; known keys: {', '.join(_KEYS)}"
        )
    if "messages" in entry:
        turns = _hugging_face_turns(entry["messages"])
    else:
        turns = _llava_turns(entry["conversations"])
    images = _images(entry)
    messages = [{"role": role, "content": _content(content)} for role, content in turns]
    num_parts = sum(
        part["type"] == "image"
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    )
    if num_parts != len(images):
        raise _EntryError(
            f"{len(images)} images, but {num_parts} places for them in the messages "
            f'({IMAGE_MARKER} or {{"type": "image"}}); the two numbers must be equal'
        )
    return ParsedConversation(str(entry.get("id", default_id)), tuple(messages), images, place)


def _images(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if "image" in entry and "images" in entry:
        raise _EntryError("has both 'image' and 'images'; keep one")
    value = entry.get("images", entry.get("image"))
    paths = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise _EntryError(f"images = {_shown(value)}: should be a list of paths")
    return tuple(paths)


def _hugging_face_turns(messages: Any) -> list[tuple[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _EntryError(f"messages = {_shown(messages)}: should be a list of at least one")
    turns = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES or "content" not in message:
            raise _EntryError(
                f"{_shown(message)}: a message has a 'role' ({', '.join(_ROLES)}) and a 'content'"
            )
        turns.append((role, message["content"]))
    while turns and turns[-1][0] == "assistant":
        turns.pop()
    if not turns or turns[-1][0] != "user":
        raise _EntryError("the last message (answers left out) should be the user's")
    return turns


def _llava_turns(conversations: Any) -> list[tuple[str, Any]]:
    if not isinstance(conversations, list):
        raise _EntryError(f"conversations = {_shown(conversations)}: should be a list of turns")
    turns: list[tuple[str, Any]] = []
    for turn in conversations:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise _EntryError(f"{_shown(turn)}: a turn has 'from' and 'value', both text")
        role = _LLAVA_ROLES.get(str(turn.get("from")))
        if role is not None:
            turns.append((role, turn["value"]))
        if role == "user":
            return turns
    raise _EntryError("has no turn from 'human'")


def _content(content: Any) -> str | list[dict[str, str]]:
    """Text without images as it is; otherwise parts, in order."""
    if isinstance(content, str):
        return _split_markers(content) if IMAGE_MARKER in content else content
    if not isinstance(content, list):
        raise _EntryError(f"content = {_shown(content)}: should be text or a list of parts")
    parts: list[dict[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts += _split_markers(part["text"])
        elif kind == "image" and len(part) == 1:
            parts.append({"type": "image"})
        else:
            raise _EntryError(
                f'{_shown(part)}: a part is {{"type": "text", "text": ...}} or '
                '{"type": "image"}; paths of images belong into \'images\''
            )
    return parts


def _split_markers(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(text.split(IMAGE_MARKER)):
        if index:
            parts.append({"type": "image"})
        # The line break beside a marker belongs to the marker: templates write their own.
        piece = piece.strip("\n") if IMAGE_MARKER in text else piece
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
