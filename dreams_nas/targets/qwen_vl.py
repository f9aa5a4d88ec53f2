"""Qwen2.5-VL: three-dimensional positions, fewer of them than tokens where an image stands.

After a prompt with images the next position is length + delta. transformers keeps delta on the
model, where it leaks from one prompt into the next; here positions are always given and delta
lives in the cache.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dreams_nas.targets.cache import PreallocatedCache
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs


class QwenVLTarget(HuggingFaceTarget):
    """Qwen2.5-VL with images (no video)."""

    model_types = ("qwen2_5_vl",)
    auto_class = "AutoModelForImageTextToText"
    takes_images = True
    input_names = ("pixel_values", "image_grid_thw", "mm_token_type_ids")

    def num_image_tokens(self, model_inputs: Mapping[str, Tensor]) -> list[int]:
        """Merged patches of each image's grid."""
        grids = model_inputs.get("image_grid_thw")
        if grids is None:
            return []
        merge = self.model.config.vision_config.spatial_merge_size
        return [t * h * w // merge**2 for t, h, w in grids.tolist()]

    def _prefill_arguments(self, inputs: TargetInputs, cache: PreallocatedCache) -> dict[str, Any]:
        arguments = super()._prefill_arguments(inputs, cache)
        types_1T = arguments.pop("mm_token_type_ids", None)
        ids_1T = inputs.input_ids_T[None]
        if inputs.image_spans:
            assert types_1T is not None, "a prompt with images needs mm_token_type_ids"
            positions_31T, delta = self.model.model.get_rope_index(
                ids_1T, types_1T, image_grid_thw=arguments["image_grid_thw"]
            )
            cache.position_delta = int(delta)
        else:
            positions = torch.arange(ids_1T.shape[1], device=ids_1T.device)
            positions_31T, cache.position_delta = positions.expand(3, 1, -1), 0
        return {**arguments, "position_ids": positions_31T}

    def _positions(self, depths_Q: Tensor, cache: PreallocatedCache) -> Tensor:
        return (depths_Q + (cache.length + cache.position_delta)).expand(3, 1, -1)
