"""Chat messages and images to checked model inputs.

Shapes: T prompt tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.targets.protocol import TargetInputs

if TYPE_CHECKING:
    from dreams_nas.targets.huggingface import HuggingFaceTarget


def load_image(path: Path | str) -> Image.Image:
    """Read an image file as RGB.

    Raises:
        UserError: No such file, or not an image that Pillow can read.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such image file") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: not a readable image ({error}); give a PNG or JPEG") from error


def prepare_model_inputs(
    target: "HuggingFaceTarget", messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
) -> tuple[Tensor, dict[str, Tensor], list[tuple[int, int]]]:
    """Apply the chat template: token ids [T], tensors by name, (width, height) of each image.

    Raises:
        UserError: Images and their places in the messages do not match, or no chat template.
    """
    loaded = [load_image(i) if isinstance(i, (str, Path)) else i for i in images]
    chat = [_with_parts(message) for message in messages]
    places = [part for message in chat for part in message["content"] if part["type"] == "image"]
    if len(places) != len(loaded):
        raise UserError(
            f"the messages have {len(places)} image entries, but {len(loaded)} images were given; "
            'put one {"type": "image"} per image into the messages'
        )
    if loaded and not target.takes_images:
        raise UserError(f"{target.spec.name} reads text only, but {len(loaded)} images were given")
    for part, image in zip(places, loaded, strict=True):
        part["image"] = image
    reader = target.processor if target.takes_images else target.tokenizer
    if reader is None or not getattr(reader, "chat_template", None):
        raise UserError(
            f"{target.spec.name} has no chat template; use an instruction-tuned checkpoint "
            "with its tokenizer and processor files"
        )
    if target.takes_images:
        _refuse_placeholders(chat, reader)
    else:
        chat = [{**m, "content": "".join(p["text"] for p in m["content"])} for m in chat]
    found = reader.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return found["input_ids"][0], dict(found), [image.size for image in loaded]


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message whose content is a list of image and text parts."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if unknown := {part["type"] for part in parts} - {"text", "image"}:
        raise UserError(
            f"a message has parts of type {sorted(unknown)}; supported are 'text' and 'image'"
        )
    return {**message, "content": [dict(part) for part in parts]}


def _refuse_placeholders(chat: Sequence[Mapping[str, Any]], processor: Any) -> None:
    """A placeholder inside a text would be taken for one more image."""
    names = {getattr(processor, "image_token", None)}
    names.add(getattr(processor.tokenizer, "image_token", None))
    for text in (p["text"] for m in chat for p in m["content"] if p["type"] == "text"):
        for name in names - {None}:
            if name in text:
                raise UserError(
                    f"the text {text[:60]!r} contains {name!r}, which stands for an image; "
                    "take it out and give the image itself"
                )


def build_inputs(
    target: "HuggingFaceTarget",
    input_ids_T: Tensor,
    model_inputs: dict[str, Tensor],
    image_sizes: Sequence[tuple[int, int]],
) -> TargetInputs:
    """Check a prompt and move it to the target's device; see `HuggingFaceTarget.build_inputs`."""
    num_tokens, limit = len(input_ids_T), target.spec.max_positions
    if num_tokens > limit:
        raise UserError(
            f"the prompt has {num_tokens} tokens, but {target.spec.name} has {limit} positions; "
            "shorten the text or use smaller or fewer images"
        )
    is_image_T = torch.zeros_like(input_ids_T, dtype=torch.bool)
    if target.takes_images and target.image_token_id is not None:
        is_image_T = input_ids_T.eq(target.image_token_id)
    counts = target.num_image_tokens(model_inputs)
    num_image_tokens = int(is_image_T.sum())
    if sum(counts) != num_image_tokens:
        sizes = ", ".join(f"{w} x {h}" for w, h in image_sizes) or "unknown"
        raise UserError(
            f"the prompt has {num_image_tokens} image tokens, but its {len(counts)} images yield "
            f"{sum(counts)} visual features (image sizes: {sizes}); the processor's settings do "
            f"not fit {target.spec.name}"
        )
    moved = {
        key: value.to(target.device, target.dtype if value.is_floating_point() else None)
        for key, value in model_inputs.items()
    }
    return TargetInputs(
        input_ids_T=input_ids_T.to(target.device),
        image_spans=_image_spans(is_image_T, counts),
        image_mask_T=is_image_T.to(target.device) if counts else None,
        model_inputs=moved,
    )


def _image_spans(is_image_T: Tensor, counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[first, last + 1) of the tokens of each image, told apart by their counts."""
    places: list[int] = is_image_T.nonzero()[:, 0].tolist()
    spans, start = [], 0
    for count in counts:
        spans.append((places[start], places[start + count - 1] + 1))
        start += count
    return tuple(spans)
