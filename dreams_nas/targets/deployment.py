"""Where a loaded target runs."""

import torch

from dreams_nas.core.device import Deployment, build_deployment
from dreams_nas.targets.protocol import Target

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def target_deployment(target: Target) -> Deployment:
    """The deployment that a target runs in, in this process."""
    attention = "sdpa"
    model = getattr(target, "model", None)
    if model is not None and model.config._attn_implementation == "eager":
        attention = "eager"
    return build_deployment(
        str(target.device),
        _DTYPE_NAMES[target.dtype],  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        threads=torch.get_num_threads(),
    )
