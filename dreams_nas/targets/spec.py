"""Who a target is: the hashes and sizes that drafts, tables and feature stores must match."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dreams_nas.core.files import hash_json
from dreams_nas.space.arch import TargetDims
from dreams_nas.targets.protocol import TargetSpec

_HASH_CHARS = 16
_ROWS_PER_CHUNK = 8192
_NAME_KEYS = {"_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype"}
_NAME_KEYS |= {"torch_dtype", "id2label", "label2id", "attn_implementation"}


def build_spec(model: Any, tokenizer: Any, name: str | None = None) -> TargetSpec:
    """Describe a loaded model.

    Args:
        model: A model of transformers with a head.
        tokenizer: Its tokenizer, or None.
        name: Name for people; by default the last part of where the model came from.
    """
    text = model.config.get_text_config()
    folder = name or Path(str(getattr(model.config, "_name_or_path", ""))).name or "random"
    num_heads = text.num_attention_heads
    return TargetSpec(
        name=f"{type(model).__name__}/{folder}",
        dims=TargetDims(
            hidden=text.hidden_size,
            num_layers=text.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            ffn=text.intermediate_size,
            vocab=model.get_output_embeddings().weight.shape[0],
        ),
        tokenizer_hash=hash_tokenizer(tokenizer),
        embedding_hash=hash_values(model.get_input_embeddings().weight),
        shape_hash=hash_json(_without_names(model.config.to_dict())),
        max_positions=text.max_position_embeddings,
        eos_token_ids=eos_token_ids(model, tokenizer),
        rms_norm_eps=text.rms_norm_eps,
    )


def eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer, by the generation config and by the tokenizer, ascending."""
    found: set[int] = set()
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        found.update(
            value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        )
    return tuple(sorted(found))


def hash_tokenizer(tokenizer: Any) -> str:
    """Hash of what turns text into tokens; "none" without a tokenizer."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hash_json([sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map])
    state = json.loads(backend.to_str())
    # Padding and truncation are left-overs of the last call, not part of the tokenizer.
    return hash_json({k: v for k, v in state.items() if k not in ("padding", "truncation")})


def hash_values(weight: Tensor) -> str:
    """Hash of a matrix's values and shape, the same for every dtype that holds them exactly."""
    digest = hashlib.sha256(str(tuple(weight.shape)).encode())
    for chunk in weight.detach().split(_ROWS_PER_CHUNK):
        digest.update(chunk.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:_HASH_CHARS]


def _without_names(value: Any) -> Any:
    """A config's plain data without what does not change its cost: names, dtype, token ids."""
    if isinstance(value, dict):
        return {
            key: _without_names(item)
            for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))
            if key not in _NAME_KEYS and not str(key).endswith(("_token_id", "_token_index"))
        }
    if isinstance(value, (list, tuple)):
        return [_without_names(item) for item in value]
    return value
