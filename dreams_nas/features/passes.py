"""Features of prompt and answer in one teacher-forced pass.

Shapes: B batch, T prompt and answer tokens, F = L * D tapped features, D hidden, M image tokens.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dreams_nas.features.recording import Recording
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs


@torch.inference_mode()
def record_features(
    target: HuggingFaceTarget,
    ids: Sequence[str],
    prompts: Sequence[TargetInputs],
    answers: Sequence[Tensor],
    target_layer_ids: tuple[int, ...],
    store_dtype: torch.dtype | None = None,
) -> list[Recording]:
    """Run prompts with their answers in one batch and keep what drafts learn from.

    Padding stands behind the answers, where no row looks at it whatever the family's mask, and
    positions are those of a prompt alone.

    Args:
        target: The target that gave the answers.
        ids: Sample ids.
        prompts: Prompts, images included.
        answers: Answer tokens of each, at least one.
        target_layer_ids: Layers to record, ascending, the last block among them.
        store_dtype: Precision of the features; by default the target's.

    Returns:
        Recordings on the CPU, in order.
    """
    total = max(len(p.input_ids_T) + len(a) for p, a in zip(prompts, answers, strict=True))
    extended = [_extend(p, a, total) for p, a in zip(prompts, answers, strict=True)]
    batch, _ = target.collate(extended)
    with ExitStack() as stack:
        states = stack.enter_context(target.capture_layers(target_layer_ids))
        merged = stack.enter_context(target.capture_embeddings())
        importance: list[Tensor | None] = [None] * len(prompts)
        if any(prompt.image_spans for prompt in prompts):
            importance = stack.enter_context(target.capture_importance(prompts))
        # One row of logits: the others would be the largest tensor of the pass.
        target.model(**batch, use_cache=False, logits_to_keep=1)
    dtype = store_dtype or target.dtype
    recordings = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens_T = torch.cat([prompt.input_ids_T, answer])
        features = [states[k][row, : len(tokens_T)].to("cpu", dtype) for k in target_layer_ids]
        image_mask_T, importance_T = prompt.image_mask_T, importance[row]
        if image_mask_T is None or importance_T is None:
            image_embeddings_MD = merged[0].new_empty((0, merged[0].shape[2]))
            importance_M = torch.empty(0)
        else:
            image_embeddings_MD = merged[0][row, : len(image_mask_T)][image_mask_T]
            importance_M = importance_T[image_mask_T]
        recordings.append(
            Recording(
                id=ids[row],
                tokens_T=tokens_T.cpu(),
                prompt_length=len(prompt.input_ids_T),
                image_spans=prompt.image_spans,
                target_layer_ids=target_layer_ids,
                features_TF=torch.cat(features, dim=1),
                image_embeddings_MD=image_embeddings_MD.to("cpu", dtype),
                importance_M=importance_M.to("cpu", torch.float32),
            )
        )
    return recordings


def _extend(prompt: TargetInputs, answer: Tensor, total: int) -> TargetInputs:
    """The prompt with its answer, filled up with the answer's last token to `total` tokens."""
    tokens = torch.cat([prompt.input_ids_T, answer])
    filler = answer[-1:].expand(total - len(tokens))
    num_new = total - len(prompt.input_ids_T)
    tensors = {
        key: F.pad(value, (0, num_new)) if key.endswith("token_type_ids") else value
        for key, value in prompt.model_inputs.items()
    }
    return replace(prompt, input_ids_T=torch.cat([tokens, filler]), model_inputs=tensors)
