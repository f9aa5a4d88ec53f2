"""Recordings of tiny targets' own greedy answers, and made-up ones."""

import torch
from target_models import build_prompt
from torch import Tensor

from dreams_nas.draft.body import DraftBody
from dreams_nas.features.recording import Recording
from dreams_nas.targets.huggingface import HuggingFaceTarget


def record_answer(
    target: HuggingFaceTarget,
    num_new: int,
    *,
    num_images: int = 1,
    num_text: int = 12,
    seed: int = 0,
    layer_ids: tuple[int, ...] | None = None,
) -> Recording:
    """Decode greedily, one token after the other, and keep what the target felt."""
    taps = layer_ids or tuple(range(target.spec.dims.num_layers))
    inputs = build_prompt(target, num_images, num_text=num_text, seed=seed)
    length = len(inputs.input_ids_T)
    cache = target.build_cache(length + num_new)
    prefill = target.prefill(inputs, cache, target_layer_ids=taps, want_importance=True)
    tokens = [*inputs.input_ids_T.tolist(), int(prefill.logits_V.argmax())]
    features = [prefill.features_TF]
    for step in range(num_new):
        depth_1 = torch.zeros(1, dtype=torch.int64)
        out = target.verify(torch.tensor(tokens[-1:]), depth_1, None, cache, target_layer_ids=taps)
        cache.commit([0])
        features.append(out.features_QF)
        if step + 1 < num_new:
            tokens.append(int(out.logits_QV[0].argmax()))
    is_image_P = torch.zeros(length, dtype=torch.bool)
    for start, stop in inputs.image_spans:
        is_image_P[start:stop] = True
    importance_P = prefill.importance_T
    if importance_P is None:
        importance_P = torch.zeros(length, dtype=target.dtype)
    return Recording(
        id=f"{num_images}-{seed}",
        tokens_T=torch.tensor(tokens),
        prompt_length=length,
        image_spans=inputs.image_spans,
        target_layer_ids=taps,
        features_TF=torch.cat(features).clone(),
        image_embeddings_MD=prefill.embeddings_TD[is_image_P].clone(),
        importance_M=importance_P[is_image_P].clone(),
    )


def made_up_recording(
    answer: list[int],
    *,
    prompt: list[int],
    hidden: int,
    layer_ids: tuple[int, ...] = (0, 1),
    image_spans: tuple[tuple[int, int], ...] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Recording:
    """Given tokens with random features."""
    generator = torch.Generator().manual_seed(seed)
    num_images = sum(stop - start for start, stop in image_spans)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype)

    return Recording(
        id=f"made-up-{seed}",
        tokens_T=torch.tensor(prompt + answer),
        prompt_length=len(prompt),
        image_spans=image_spans,
        target_layer_ids=layer_ids,
        features_TF=draw(len(prompt) + len(answer), len(layer_ids) * hidden),
        image_embeddings_MD=draw(num_images, hidden),
        importance_M=draw(num_images).abs(),
    )


def shake(body: DraftBody, seed: int = 0) -> None:
    """Draw weights with sharp attention and norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    body.initialise(generator)
    with torch.no_grad():
        for name, parameter in body.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif not name.endswith("fc"):
                parameter.mul_(3)
