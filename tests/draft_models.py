"""Random drafts for tiny random targets, and targets that such drafts can sometimes foresee."""

from typing import Any

import torch
from target_models import EOS, build_target
from torch import Tensor

from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.drafting import ReadyDraft, ready_draft
from dreams_nas.draft.config import DraftConfig
from dreams_nas.draft.model import DraftModel
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.huggingface import HuggingFaceTarget

LOUD_TOKENS = (5, 17, 23, 40, 61, 77)

TREES: dict[str, StaticTree] = {
    "chain": StaticTree.chain(4),
    "one": StaticTree.chain(1),
    "wide": StaticTree.from_paths([(0,), (1,), (2,), (4,)]),
    "bushy": StaticTree.from_paths(
        [(r,) for r in range(5)]
        + [(a, b) for a in (0, 1, 3) for b in (0, 2)]
        + [(0, 0, 0), (0, 0, 1), (1, 2, 0), (3, 0, 2), (0, 0, 1, 0), (3, 0, 2, 0)]
    ),
}
"""Draft trees of every shape: a chain, a lone node, one level, uneven branches."""


def build_loud_target(family: str, **options: Any) -> HuggingFaceTarget:
    """A random target that answers with six tokens, so that a random draft is sometimes right."""
    target = build_target(family, **options)
    quiet = torch.ones(target.spec.dims.vocab, dtype=torch.bool)
    quiet[list(LOUD_TOKENS)] = False
    weight = target.model.get_output_embeddings().weight
    weight.data[quiet] *= 0.02
    weight.data[~quiet] *= 2
    return target


def build_config(target: HuggingFaceTarget, arch: DraftArch) -> DraftConfig:
    """Configuration of a draft for this target."""
    return DraftConfig(
        arch=arch,
        target_dims=target.spec.dims,
        rms_norm_eps=target.spec.rms_norm_eps,
        target_name=target.spec.name,
        tokenizer_hash=target.spec.tokenizer_hash,
        embedding_hash=target.spec.embedding_hash,
    )


def build_draft(target: HuggingFaceTarget, arch: DraftArch, seed: int = 0) -> DraftModel:
    """A draft with random weights, norms away from 1, the loud tokens and EOS first."""
    config = build_config(target, arch)
    generator = torch.Generator().manual_seed(seed)
    first = [*LOUD_TOKENS, EOS]
    rest = [t for t in torch.randperm(config.target_dims.vocab, generator=generator).tolist()]
    order = first + [t for t in rest if t not in first]
    vocab = torch.tensor(order[: config.sizes.vocab])
    if arch.vocab == 1:
        vocab = torch.arange(config.target_dims.vocab)
    draft = DraftModel(config, target.inv_freq, vocab)
    draft.body.initialise(generator)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif not name.endswith("fc"):
                parameter.mul_(3)
    return draft.to(target.dtype)


def build_ready(target: HuggingFaceTarget, arch: DraftArch, seed: int = 0) -> ReadyDraft:
    """The same, ready to decode."""
    return ready_draft(build_draft(target, arch, seed), target)


def draw_by_law(self: Chooser, probabilities_QV: Tensor) -> Tensor:
    """A draw that is a function of the distribution alone, the same wherever it is met."""
    weights_V = torch.linspace(0.1, 7.3, probabilities_QV.shape[-1], dtype=torch.float64).sin()
    place_Q = (probabilities_QV.double() @ weights_V * 1e3).remainder(1)
    return (probabilities_QV.double().cumsum(-1) > place_Q[:, None]).int().argmax(-1)
