"""A trained supernet on disk: `config.json` and `model.safetensors`."""

from pathlib import Path
from typing import Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json
from dreams_nas.draft.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_weights, save_pair
from dreams_nas.draft.config import DraftConfig
from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.supernet.supernet import Supernet


class SupernetConfig(Config):
    """`config.json` of a supernet: its sizes and the target it belongs to."""

    schema_version: Literal["dreams-nas/supernet/1"] = "dreams-nas/supernet/1"
    """Format of the folder."""
    target_dims: TargetDims
    """Sizes of the target's decoder."""
    tap_layer_ids: tuple[int, ...]
    """Target layers that its subnets may read, ascending."""
    depth: int = Field(ge=1)
    """Layers of the deepest subnet."""
    rms_norm_eps: float = Field(gt=0)
    """Epsilon of every norm."""
    target_name: str
    """Which target, for people."""
    tokenizer_hash: str
    """The target's tokenizer."""
    embedding_hash: str
    """The target's embedding values."""

    def draft_config(self, arch: DraftArch) -> DraftConfig:
        """Configuration of a subnet as a draft of its own."""
        return DraftConfig(
            arch=arch,
            target_dims=self.target_dims,
            rms_norm_eps=self.rms_norm_eps,
            target_name=self.target_name,
            tokenizer_hash=self.tokenizer_hash,
            embedding_hash=self.embedding_hash,
        )


class _Spec(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dims(self) -> TargetDims: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tokenizer_hash(self) -> str: ...
    @property
    def embedding_hash(self) -> str: ...


class SharedTarget(Protocol):
    """What a supernet takes from its target; every `Target` has it."""

    device: torch.device

    @property
    def spec(self) -> _Spec:
        """Who it is."""

    @property
    def head_weight_VD(self) -> Tensor:
        """Weight of the language model head."""

    @property
    def inv_freq(self) -> Tensor:
        """Rotary frequencies."""


def build_supernet(
    config: SupernetConfig, target: SharedTarget, vocab_order_V: Tensor, seed: int = 0
) -> Supernet:
    """A supernet with fresh float32 weights on the target's device."""
    supernet = Supernet(
        config.target_dims,
        tap_layer_ids=config.tap_layer_ids,
        depth=config.depth,
        inv_freq=target.inv_freq,
        eps=config.rms_norm_eps,
        head_weight_VD=target.head_weight_VD.float(),
        vocab_order_V=vocab_order_V.to(target.device),
    )
    supernet.body.initialise(torch.Generator().manual_seed(seed))
    return supernet.to(target.device)


def supernet_config(
    target: SharedTarget, tap_layer_ids: tuple[int, ...], depth: int
) -> SupernetConfig:
    """Describe a supernet for a target."""
    spec = target.spec
    return SupernetConfig(
        target_dims=spec.dims,
        tap_layer_ids=tap_layer_ids,
        depth=depth,
        rms_norm_eps=spec.rms_norm_eps,
        target_name=spec.name,
        tokenizer_hash=spec.tokenizer_hash,
        embedding_hash=spec.embedding_hash,
    )


def save_supernet(folder: Path, supernet: Supernet, config: SupernetConfig) -> None:
    """Write weights with the vocabulary order, and the configuration they are stamped with."""
    tensors = {n: t.detach().cpu().contiguous() for n, t in supernet.state_dict().items()}
    save_pair(folder, tensors, config.model_dump(mode="json"))


def load_supernet(folder: Path, target: SharedTarget) -> tuple[Supernet, SupernetConfig]:
    """Read a supernet and bind it to its target.

    Raises:
        UserError: A missing or broken file, files of different saves, another target, or tensors
            that are missing, unknown, of another shape than the configuration says, or not finite.
    """
    described, path = read_json(folder / CONFIG_FILE), folder / WEIGHTS_FILE
    config = build_config(SupernetConfig, described, str(folder / CONFIG_FILE))
    spec = target.spec
    probe = config.draft_config(DraftArch(tap="last"))
    probe.require_target(spec.tokenizer_hash, spec.embedding_hash, spec.name)
    tensors = load_weights(folder, described, "supernet", target.device)
    order_V = tensors.get("vocab_order_V")
    ids_V = torch.arange(config.target_dims.vocab, device=target.device)
    if order_V is None or not torch.equal(order_V.sort().values, ids_V):
        raise UserError(f"{path}: 'vocab_order_V' must name each of {len(ids_V)} tokens once")
    supernet = build_supernet(config, target, order_V)
    expected = supernet.state_dict()
    if unlike := sorted(set(expected) ^ set(tensors)):
        raise UserError(f"{path}: missing or unknown tensors {unlike}")
    for name, own in expected.items():
        if tensors[name].shape != own.shape:
            raise UserError(
                f"{path}: tensor '{name}' has shape {list(tensors[name].shape)}, the configuration "
                f"asks for {list(own.shape)}"
            )
        if not torch.isfinite(tensors[name]).all():
            raise UserError(f"{path}: tensor '{name}' holds values that are not finite")
    supernet.load_state_dict(tensors)
    return supernet, config
