"""Prompts to collect answers for: from files, or from the embedded target's generator."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from dreams_nas.core.errors import UserError, unknown_error
from dreams_nas.core.files import hash_json
from dreams_nas.features.conversation_files import ParsedConversation, parse_file

EMBEDDED_SPLITS = ("train", "choose", "score", "test")
NUM_GENERATED = 960
"""Generated conversations when no count is given."""
_EMBEDDED = "embedded:"


@dataclass(frozen=True)
class Conversation:
    """Chat messages up to the point where the target answers, and the images in them."""

    id: str
    """Unique in its data set."""
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages in the form of Hugging Face; the last one is the user's."""
    images: tuple[Path | Image.Image, ...] = ()
    """One per image part of the messages, in order."""
    origin: str = ""
    """Where it was read, for messages: "FILE:LINE"."""

    def load_images(self) -> list[Image.Image]:
        """Decode the images, as RGB.

        Raises:
            UserError: A file is missing, is no image, or is damaged.
        """
        return [self._load(image) for image in self.images]

    def _load(self, image: Path | Image.Image) -> Image.Image:
        if isinstance(image, Image.Image):
            return image.convert("RGB")
        try:
            with Image.open(image) as opened:
                return opened.convert("RGB")
        except _IMAGE_ERRORS as error:
            raise UserError(f"{self}: {_image_problem(image, error)}") from error

    def check_images(self) -> None:
        """Look at the head of every image file, without decoding it.

        Raises:
            UserError: A file is missing or is no image.
        """
        for image in self.images:
            if isinstance(image, Path):
                try:
                    Image.open(image).close()
                except _IMAGE_ERRORS as error:
                    raise UserError(f"{self}: {_image_problem(image, error)}") from error

    def content_hash(self) -> str:
        """Hash of the id, the messages and the images' content (not of their paths)."""
        return hash_json([self.id, self.prompt_hash()])

    def prompt_hash(self) -> str:
        """Hash of the messages and the images' content: equal for one prompt under two ids."""
        return hash_json([list(self.messages), [_image_hash(image) for image in self.images]])

    def __str__(self) -> str:
        place = f"{self.origin}, " if self.origin else ""
        return f"{place}sample '{self.id}'"


# PIL raises SyntaxError and ValueError on some damaged headers.
_IMAGE_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def _image_problem(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"image {path} does not exist; image paths are relative to the data file"
    if isinstance(error, UnidentifiedImageError):
        return f"{path} is no image that can be read; give PNG, JPEG or WebP, or drop the sample"
    return f"image {path} cannot be read ({error}); repair it or drop the sample"


def _image_hash(image: Path | Image.Image) -> str:
    digest = hashlib.sha256()
    if isinstance(image, Path):
        digest.update(image.read_bytes())
    else:
        digest.update(f"{image.mode} {image.size}".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()[:32]


def load_conversations(
    source: str | Path, count: int | None = None, seed: int = 0
) -> list[Conversation]:
    """Load prompts by name or from a file.

    A name is `embedded:train`, `embedded:choose`, `embedded:score` or `embedded:test`: generated
    charts and questions of that split. A file is JSON Lines (.jsonl) or a JSON list (.json); each
    entry has `images` (paths relative to the file) and `messages` in the form of Hugging Face,
    or, as in the data of LLaVA, `image` and `conversations`; `id` is optional.

    Args:
        source: Name or path.
        count: Number of conversations, the first of a file; None takes all of a file, or
            `NUM_GENERATED`.
        seed: Seed of generated conversations.

    Raises:
        UserError: Nothing there, or an entry that breaks a rule: names file, line and id.
    """
    if count is not None and count < 1:
        raise UserError(f"count = {count}: should be at least 1")
    if str(source).startswith(_EMBEDDED):
        return _generate(str(source).removeprefix(_EMBEDDED), count, seed)
    path = Path(source)
    loaded = [_from_parsed(parsed, path.parent) for parsed in parse_file(path, count)]
    if not loaded:
        raise UserError(f"{path}: holds no conversations; it needs at least one")
    check_ids(loaded)
    for conversation in loaded:
        conversation.check_images()
    return loaded


def split_of(source: str | Path) -> str:
    """Split that a named data set is for; empty for a file."""
    name = str(source)
    return name.removeprefix(_EMBEDDED) if name.startswith(_EMBEDDED) else ""


def check_ids(conversations: Sequence[Conversation]) -> None:
    """Refuse two conversations with one id.

    Raises:
        UserError: Names the id and both places.
    """
    seen: dict[str, Conversation] = {}
    for conversation in conversations:
        other = seen.setdefault(conversation.id, conversation)
        if other is not conversation:
            raise UserError(
                f"{conversation}: this id is taken by {other.origin or 'an earlier sample'}; "
                "ids must be unique"
            )


def _from_parsed(parsed: ParsedConversation, folder: Path) -> Conversation:
    return Conversation(
        id=parsed.id,
        messages=parsed.messages,
        images=tuple(folder / image for image in parsed.images),
        origin=parsed.origin,
    )


def _generate(split: str, count: int | None, seed: int) -> list[Conversation]:
    if split not in EMBEDDED_SPLITS:
        names = [f"{_EMBEDDED}{name}" for name in EMBEDDED_SPLITS]
        raise unknown_error("data set", f"{_EMBEDDED}{split}", names)
    from dreams_nas.targets.embedded import generator

    made = generator.conversations(split, NUM_GENERATED if count is None else count, seed)
    return [Conversation(c.id, tuple(c.messages), tuple(c.images)) for c in made]
