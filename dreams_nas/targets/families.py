"""Which adapter serves which model."""

from typing import Any

from dreams_nas.core.errors import unknown_error
from dreams_nas.targets.gemma3 import Gemma3Target, Gemma3TextTarget
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.llava import LlavaTarget
from dreams_nas.targets.qwen_vl import QwenVLTarget
from dreams_nas.targets.text import TextTarget

ADAPTERS: dict[str, type[HuggingFaceTarget]] = {
    model_type: adapter
    for adapter in (LlavaTarget, QwenVLTarget, Gemma3Target, Gemma3TextTarget, TextTarget)
    for model_type in adapter.model_types
}
"""Adapter by the `model_type` of a config."""


def adapter_for(config: Any, where: str = "") -> type[HuggingFaceTarget]:
    """Return the adapter for a model's config.

    Raises:
        UserError: No adapter for this family; names those there are.
    """
    if config.model_type not in ADAPTERS:
        raise unknown_error("target family", config.model_type, sorted(ADAPTERS), where)
    return ADAPTERS[config.model_type]


def wrap_model(model: Any, processor: Any = None, tokenizer: Any = None) -> HuggingFaceTarget:
    """Wrap a loaded model of transformers in its family's adapter.

    Raises:
        UserError: As `adapter_for`.
    """
    return adapter_for(model.config)(model, processor, tokenizer)
