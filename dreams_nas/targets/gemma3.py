"""Gemma3: masks by layer type, a sliding window, image blocks that see themselves both ways.

Image blocks are complete in the prompt, so their two-way mask is the prefill's business alone
(the model builds it from `token_type_ids`); verification is causal with the window by position.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.targets.cache import PreallocatedCache
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs


class Gemma3TextTarget(HuggingFaceTarget):
    """Gemma3 for text alone, logit soft-capping included."""

    model_types = ("gemma3_text",)

    def __init__(
        self, model: Any, processor: Any = None, tokenizer: Any = None, name: str | None = None
    ) -> None:
        super().__init__(model, processor, tokenizer, name)
        if getattr(self.text_config, "use_bidirectional_attention", False):
            raise UserError(f"{self.spec.name}: an encoder (bidirectional attention) cannot decode")

    @property
    def inv_freq(self) -> Tensor:
        """Rotary frequencies of the full attention layers, [E / 2], float32."""
        frequencies: Tensor = self.decoder.rotary_emb.full_attention_inv_freq
        return frequencies.float()

    def _logits(self, normed: Tensor) -> Tensor:
        logits = super()._logits(normed)
        cap = self.text_config.final_logit_softcapping
        # transformers caps the logits in its text-only class alone.
        if cap is None or self.takes_images:
            return logits
        capped: Tensor = (logits / cap).tanh() * cap
        return capped


class Gemma3Target(Gemma3TextTarget):
    """Gemma3 with images."""

    model_types = ("gemma3",)
    auto_class = "AutoModelForImageTextToText"
    takes_images = True
    input_names = ("pixel_values", "token_type_ids")

    def num_image_tokens(self, model_inputs: Mapping[str, Tensor]) -> list[int]:
        """Pooled features per image (or crop), the same number for each."""
        pixels = model_inputs.get("pixel_values")
        count = self.model.config.mm_tokens_per_image
        return [] if pixels is None else [count] * len(pixels)

    def _prefill_arguments(self, inputs: TargetInputs, cache: PreallocatedCache) -> dict[str, Any]:
        arguments = super()._prefill_arguments(inputs, cache)
        # Without token types the image would silently be causal.
        assert "token_type_ids" in arguments or not inputs.image_spans
        return arguments
