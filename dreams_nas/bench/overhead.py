"""What verification costs beyond the decoder's own forward of that shape."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from dreams_nas.bench.statistics import Quantiles, quantiles
from dreams_nas.decode.plan import TreePlan
from dreams_nas.targets.grouped import grouped_queries
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs

_NUM_WARMUP = 5


@torch.inference_mode()
def verify_over_forward(
    target: HuggingFaceTarget,
    plan: TreePlan,
    taps: tuple[int, ...],
    inputs: TargetInputs,
    num_repeats: int = 40,
) -> Quantiles | None:
    """Time `verify` with taps over decoder and head called bare with the same tensors.

    Both run on the same cache after the same prompt, by turns; masks and positions of the bare
    call are made before its clock starts.

    Args:
        target: Whose passes are timed.
        plan: The rows of a verification.
        taps: Layers that `verify` taps.
        inputs: The prompt before.
        num_repeats: Pairs that are timed.
    """
    num_rows = plan.num_nodes + 1
    cache = target.build_cache(len(inputs.input_ids_T) + num_rows)
    first = target.prefill(inputs, cache).logits_V.argmax()
    tokens_Q = first.expand(num_rows).contiguous()
    arguments = target.verify_arguments(tokens_Q, plan.depths_Q, plan.mask_QQ, cache)
    head_VD = target.head_weight_VD

    def verify() -> None:
        target.verify(tokens_Q, plan.depths_Q, plan.mask_QQ, cache, target_layer_ids=taps)

    def forward() -> None:
        F.linear(target.decoder(**arguments).last_hidden_state, head_VD)

    def seconds(run: Callable[[], None]) -> float:
        _synchronise(target.device)
        start = time.perf_counter()
        run()
        _synchronise(target.device)
        elapsed = time.perf_counter() - start
        cache.commit([])
        return elapsed

    def bare_seconds() -> float:
        with grouped_queries(target.device):  # not part of what is timed
            return seconds(forward)

    for _ in range(_NUM_WARMUP):
        seconds(verify), bare_seconds()
    ratios = []
    for index in range(num_repeats):
        if index % 2:
            bare, ours = bare_seconds(), seconds(verify)
        else:
            ours, bare = seconds(verify), bare_seconds()
        ratios.append(ours / bare)
    return quantiles(ratios)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
