"""Everything that recordings depend on, by name: change one and a store no longer fits."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dreams_nas.core.files import hash_json
from dreams_nas.features.config import CollectConfig
from dreams_nas.features.conversations import Conversation
from dreams_nas.targets.huggingface import HuggingFaceTarget

_MAX_HASHED_VALUES = 4096
_HASH_CHARS = 16
_PROCESSOR_NAMES = ("_name_or_path", "processor_class", "transformers_version")


def dtype_name(dtype: torch.dtype) -> Any:
    """`torch.float32` as configs write it: float32."""
    return str(dtype).removeprefix("torch.")


def store_key(
    target: HuggingFaceTarget, conversations: Sequence[Conversation], config: CollectConfig
) -> dict[str, Any]:
    """What the recordings of these prompts depend on, as JSON data.

    Batch and shard sizes are left out: they change features by rounding at most.

    Raises:
        UserError: A tap cannot be read on so shallow a target, or an image cannot be read.
    """
    spec = target.spec
    return {
        "shape": spec.shape_hash,
        "weights": hash_weights(target.model),
        "tokenizer": spec.tokenizer_hash,
        "template": hash_template(target),
        "processor": hash_processor(target.processor),
        "dtype": dtype_name(target.dtype),
        "store_dtype": config.store_dtype or dtype_name(target.dtype),
        "target_layer_ids": list(config.target_layer_ids(spec.dims.num_layers)),
        "max_length": min(spec.max_positions, config.max_length or spec.max_positions),
        "max_new_tokens": config.max_new_tokens,
        "eos_token_ids": list(spec.eos_token_ids),
        "conversations": hash_json([c.content_hash() for c in conversations]),
    }


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name each field of two keys that differs, with both values."""
    names = dict.fromkeys([*new, *old])
    return [
        f"{name}: {old.get(name)} against {new.get(name)}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def hash_weights(model: torch.nn.Module) -> str:
    """Hash of a model's weights: of large tensors evenly spaced values, small ones whole.

    Fine-tuning moves whole matrices, and reading all of a large model would take minutes.
    """
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().flatten()
        step = -(-len(values) // _MAX_HASHED_VALUES) or 1
        sample = values[::step].to("cpu", torch.float64)
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:_HASH_CHARS]


def hash_template(target: HuggingFaceTarget) -> str:
    """Hash of the chat template; "none" for a target without one."""
    reader = target.processor if target.takes_images else target.tokenizer
    template = getattr(reader, "chat_template", None)
    return "none" if template is None else hash_json(template)


def hash_processor(processor: Any) -> str:
    """Hash of the settings that turn images and text into inputs; "none" without a processor."""
    if processor is None:
        return "none"
    settings = processor.to_dict()
    return hash_json({k: v for k, v in settings.items() if k not in _PROCESSOR_NAMES})
