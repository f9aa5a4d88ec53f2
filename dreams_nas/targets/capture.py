"""Hooks that read a model beside its own forward: block outputs, merged embeddings, importance.

Shapes: B batch, T tokens of this step, D hidden. Hooks live as long as their `with` block: a
model that nobody reads pays nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from dreams_nas.targets.importance import attention_mass, block_queries_keys, round_per_image
from dreams_nas.targets.protocol import TargetInputs


def _keep(states: dict[int, Tensor], layer: int, _module: Any, _args: Any, output: Any) -> None:
    states[layer] = output if isinstance(output, Tensor) else output[0]


@contextmanager
def capture_layers(layers: nn.ModuleList, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that holds the outputs [B, T, D] of these blocks after every forward."""
    states: dict[int, Tensor] = {}
    handles = [layers[k].register_forward_hook(partial(_keep, states, k)) for k in layer_ids]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capture_embeddings(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """Yield a list that gets block 0's input [B, T, D] of every forward, images merged in."""
    inputs: list[Tensor] = []

    def keep(_module: Any, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    handle = layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield inputs
    finally:
        handle.remove()


@contextmanager
def capture_importance(
    attention: Any, window: int | None, prompts: Sequence[TargetInputs], offsets: Sequence[int]
) -> Iterator[list[Tensor | None]]:
    """Yield a list that the first forward fills with the importance [T] of each prompt's tokens.

    Args:
        attention: Attention module of the block to read.
        window: Its sliding window, tokens, or None.
        prompts: One per row of the batch; rows may go on behind their prompt.
        offsets: Padding before each prompt.
    """
    results: list[Tensor | None] = []

    def score(module: Any, args: Any, kwargs: Any) -> None:
        if results:  # a later step of the same generation
            return
        states_BTD = args[0] if args else kwargs["hidden_states"]
        cos_BTE, sin_BTE = kwargs["position_embeddings"]
        for row, (prompt, offset) in enumerate(zip(prompts, offsets, strict=True)):
            if not prompt.image_spans:
                results.append(None)
                continue
            at = slice(offset, offset + len(prompt.input_ids_T))
            turn = row if len(cos_BTE) > 1 else 0
            q_HTE, k_KTE = block_queries_keys(
                module, states_BTD[row, at], cos_BTE[turn, at], sin_BTE[turn, at]
            )
            mass_IT = attention_mass(q_HTE, k_KTE, module.scaling, window, prompt)
            results.append(round_per_image(mass_IT, prompt))

    handle = attention.register_forward_pre_hook(score, with_kwargs=True)
    try:
        yield results
    finally:
        handle.remove()
