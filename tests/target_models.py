"""Tiny random targets of every family, and prompts for them made without processor files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
)

from dreams_nas.targets.families import wrap_model
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs

VOCAB = 97
EOS = 2
IMAGE_TOKEN = 90
WINDOW = 7
"""Sliding window of the tiny Gemma3, tokens: prompts are longer."""
IMAGE_SIZE = 12
"""Height and width of the images of the tiny LLaVA, pixels; patches of 4."""

FAMILIES = ("llava", "qwen2_5_vl", "gemma3", "llama")
IMAGE_FAMILIES = FAMILIES[:3]
VARIANTS = ("qwen2_sliding", "qwen3", "gemma3_text", "llava_mistral")
"""Further decoders: layers that slide from the second on, QK-norm, soft-capped logits, one window
for every layer."""


def _text_sizes(num_layers: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }


def _tower_sizes() -> dict[str, Any]:
    return {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
    }


def _llama(num_layers: int, hidden: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_text_sizes(num_layers, hidden)))


def _qwen2_sliding(num_layers: int, hidden: int) -> Any:
    config = Qwen2Config(
        **_text_sizes(num_layers, hidden),
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    )
    return Qwen2ForCausalLM(config)


def _qwen3(num_layers: int, hidden: int) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**_text_sizes(num_layers, hidden), head_dim=hidden // 4))


def _llava(num_layers: int, hidden: int) -> Any:
    return _llava_on(LlamaConfig(**_text_sizes(num_layers, hidden)))


def _llava_mistral(num_layers: int, hidden: int) -> Any:
    return _llava_on(MistralConfig(**_text_sizes(num_layers, hidden), sliding_window=WINDOW))


def _llava_on(text: Any) -> Any:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=IMAGE_SIZE, **_tower_sizes()),
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


def _qwen2_5_vl(num_layers: int, hidden: int) -> Any:
    text = _text_sizes(num_layers, hidden)
    half = hidden // 4 // 2
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }
    tower = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": hidden,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _gemma3_config(num_layers: int, hidden: int, **more: Any) -> Gemma3TextConfig:
    kinds = ["sliding_attention", "full_attention"] * num_layers
    return Gemma3TextConfig(
        **_text_sizes(num_layers, hidden),
        head_dim=hidden // 4,
        query_pre_attn_scalar=hidden // 4,
        sliding_window=WINDOW,
        layer_types=kinds[:num_layers],
        **more,
    )


def _gemma3_text(num_layers: int, hidden: int) -> Any:
    return Gemma3ForCausalLM(_gemma3_config(num_layers, hidden, final_logit_softcapping=3.0))


def _gemma3(num_layers: int, hidden: int) -> Any:
    config = Gemma3Config(
        text_config=_gemma3_config(num_layers, hidden),
        vision_config=SiglipVisionConfig(image_size=16, **_tower_sizes()),
        mm_tokens_per_image=4,
        tie_word_embeddings=False,  # tied, a random model repeats its last token for ever
        image_token_id=IMAGE_TOKEN,
    )
    return Gemma3ForConditionalGeneration(config)


_MODELS: dict[str, Callable[[int, int], Any]] = {
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2_sliding": _qwen2_sliding,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3_text,
    "llava_mistral": _llava_mistral,
}


def randomise(model: Any, seed: int) -> None:
    """Draw weights at which attention is sharp and norms and biases differ from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() < 2:
            parameter.data += 0.2 * noise
        else:
            parameter.data = 1.5 * noise / parameter[0].numel() ** 0.5


def build_model(family: str, *, num_layers: int = 2, hidden: int = 32, seed: int = 0) -> Any:
    """A random fp32 model of transformers."""
    model = _MODELS[family](num_layers, hidden)
    randomise(model, seed)
    return model.eval()


def build_target(
    family: str,
    *,
    num_layers: int = 2,
    hidden: int = 32,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attention: str = "sdpa",
) -> HuggingFaceTarget:
    """A random target without tokenizer, 4 query heads on 2 key/value heads, vocabulary 97."""
    model = build_model(family, num_layers=num_layers, hidden=hidden, seed=seed)
    model.set_attn_implementation(attention)
    return wrap_model(model.to(dtype))


def image_tensors(target: HuggingFaceTarget, num_images: int, seed: int = 0) -> dict[str, Tensor]:
    """Pixels of random images as the family's processor would give them."""
    if num_images == 0:
        return {}
    generator = torch.Generator().manual_seed(seed + 1000)
    family = target.model.config.model_type
    if family == "qwen2_5_vl":
        grids = torch.tensor([[1, 4, 6], [1, 4, 4]])[:num_images]
        num_patches = int(grids.prod(1).sum())
        pixels = torch.randn(num_patches, 3 * 2 * 4 * 4, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grids}
    side = 16 if family == "gemma3" else IMAGE_SIZE
    return {"pixel_values": torch.randn(num_images, 3, side, side, generator=generator)}


def build_prompt(
    target: HuggingFaceTarget, num_images: int = 0, *, num_text: int = 12, seed: int = 0
) -> TargetInputs:
    """Random text with images (0, 1 or 2) inside; the last tokens are always text."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, 80, (num_text,), generator=generator)
    tensors = image_tensors(target, num_images, seed)
    parts = [text[:3]]
    for index, count in enumerate(target.num_image_tokens(tensors)):
        parts += [torch.full((count,), IMAGE_TOKEN), text[3 + 2 * index : 5 + 2 * index]]
    parts.append(text[3 + 2 * num_images :])
    ids = torch.cat(parts)
    types = (ids == IMAGE_TOKEN).long()[None]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in target.input_names:
            tensors[name] = types
    return target.build_inputs(ids, tensors)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image> {% else %}"
    "{{ p['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}assistant"
)
"""A chat template for the words of `build_tokenizer`."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: w3 ... w96, and the roles; everything else is <unk>."""
    words = {f"w{i}": i for i in range(3, VOCAB)}
    for index, word in {80: "user", 81: "assistant", 89: "<unk>", IMAGE_TOKEN: "<image>"}.items():
        del words[f"w{index}"]
        words[word] = index
    backend = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": EOS, **words}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_llava_processor(patch_size: int = 4) -> LlavaProcessor:
    """The processor of the tiny LLaVA; another patch size gives a wrong number of image tokens."""
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=build_tokenizer(),
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def build_gemma3_processor() -> Gemma3Processor:
    """The processor of the tiny Gemma3: an image stands as w83, which becomes w83 <image>* w84."""
    tokenizer = build_tokenizer()
    tokenizer.boi_token, tokenizer.boi_token_id = "w83", 83
    tokenizer.eoi_token, tokenizer.eoi_token_id = "w84", 84
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
        tokenizer,
        chat_template=TEMPLATE.replace("<image>", "w83"),
        image_seq_length=4,
    )


def save_target(folder: Path, family: str, *, num_layers: int = 2, seed: int = 0) -> Any:
    """Write a loadable target, processor or tokenizer included (LLaVA and text); the model."""
    model = build_model(family, num_layers=num_layers, seed=seed)
    model.save_pretrained(folder)
    reader = build_llava_processor() if family == "llava" else build_tokenizer()
    reader.save_pretrained(folder)
    return model
