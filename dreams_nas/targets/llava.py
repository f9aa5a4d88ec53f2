"""The LLaVA class: a CLIP or SigLIP tower whose projected patches replace image tokens."""

from collections.abc import Mapping

from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.targets.huggingface import HuggingFaceTarget

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


class LlavaTarget(HuggingFaceTarget):
    """LLaVA 1.5 and models of its class; positions count rows, the mask is plainly causal."""

    model_types = ("llava",)
    auto_class = "AutoModelForImageTextToText"
    takes_images = True
    input_names = ("pixel_values",)

    def num_image_tokens(self, model_inputs: Mapping[str, Tensor]) -> list[int]:
        """Patches of each image, with the class token where the tower has and keeps one."""
        pixels = model_inputs.get("pixel_values")
        if pixels is None:
            return []
        config = self.model.config
        tower = config.vision_config
        if tower.model_type not in _CLASS_TOKENS:
            raise UserError(
                f"{self.spec.name}: vision tower '{tower.model_type}' is not supported; "
                f"supported are {sorted(_CLASS_TOKENS)}"
            )
        height, width = pixels.shape[-2:]
        count = (height // tower.patch_size) * (width // tower.patch_size)
        count += _CLASS_TOKENS[tower.model_type]
        # The "default" strategy drops the first feature, whatever it is.
        count -= config.vision_feature_select_strategy == "default"
        return [int(count)] * len(pixels)
