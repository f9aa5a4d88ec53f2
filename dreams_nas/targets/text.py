"""Text-only targets: Llama, Qwen2, Qwen3."""

from dreams_nas.targets.huggingface import HuggingFaceTarget


class TextTarget(HuggingFaceTarget):
    """A decoder-only language model; its prompts hold no images."""

    model_types = ("llama", "qwen2", "qwen3")
