"""A tiny LLaVA with tokenizer, processor and chat template, and conversations for it."""

import random
import string
from typing import Any

import torch
from PIL import Image
from target_models import EOS, IMAGE_SIZE, IMAGE_TOKEN, build_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

from dreams_nas.features.conversations import Conversation
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.llava import LlavaTarget

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %} {% endfor %}"
    "{% endfor %}answer :"
)
WORDS = string.ascii_lowercase
NUM_IMAGE_TOKENS = (IMAGE_SIZE // 4) ** 2


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words of one letter, ids of the tiny models."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": EOS, "<unk>": 3, "<image>": IMAGE_TOKEN}
    for word in [*WORDS, ":", "user", "answer", "system"]:
        vocab[word] = len(vocab) - 1
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )


def build_processor(**settings: Any) -> LlavaProcessor:
    """Processor of the tiny LLaVA; settings replace those of its image processor."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return LlavaProcessor(
        CLIPImageProcessorPil(**{"size": size, "crop_size": size, **settings}),
        build_tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def build_llava(
    dtype: torch.dtype = torch.float32, *, num_layers: int = 2, seed: int = 0, **settings: Any
) -> HuggingFaceTarget:
    """A random LLaVA that reads conversations."""
    torch.manual_seed(seed)  # the tower's class token keeps the value it was made with
    model = build_model("llava", num_layers=num_layers, seed=seed).to(dtype)
    return LlavaTarget(model, build_processor(**settings), name="tiny")


def conversation(number: int, num_images: int = 1, num_words: int | None = None) -> Conversation:
    """Random words after random images."""
    draw = random.Random(number)
    words = draw.choices(WORDS, k=num_words or draw.randint(2, 14))
    pixels = [draw.randbytes(3 * 16 * 16) for _ in range(num_images)]
    parts: list[dict[str, str]] = [{"type": "image"} for _ in pixels]
    parts.append({"type": "text", "text": " ".join(words)})
    return Conversation(
        id=f"c{number}",
        messages=({"role": "user", "content": parts},),
        images=tuple(Image.frombytes("RGB", (16, 16), data) for data in pixels),
    )


def conversations(count: int, start: int = 0) -> list[Conversation]:
    """Conversations with one, no and two images in turn."""
    return [conversation(n, (1, 0, 2)[n % 3]) for n in range(start, start + count)]
