"""Where a draft can be served besides our own decode engine (`formats.md`)."""

from typing import Literal

from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.space.tree import StaticTree

Engine = Literal["own", "vllm", "sglang"]


def serving_engines(
    arch: DraftArch, dims: TargetDims, tree: StaticTree | None = None
) -> tuple[Engine, ...]:
    """Engines that load the draft; with a tree, those that can also draft and verify it.

    As read from SGLang 0.5.14 and copies of vLLM of 2026: no dropped image tokens, no tap of the
    last block's output, a hidden size that the head count divides; vLLM verifies chains only.
    """
    sizes = arch.sizes(dims)
    is_foreign = (
        arch.interaction == "fuse"
        and arch.keep_ratio == 1.0
        and dims.num_layers - 1 not in sizes.target_layer_ids
        and dims.hidden % sizes.num_heads == 0
    )
    if not is_foreign:
        return ("own",)
    return ("own", "vllm", "sglang") if tree is None or tree.is_chain else ("own", "sglang")
