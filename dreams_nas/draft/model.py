"""A draft as its own model: parameters, vocabulary, checkpoint.

Shapes: D hidden, V target vocabulary, W kept vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from dreams_nas.core.config import build_config
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json
from dreams_nas.draft.body import LINEAR_NAMES, DraftBody
from dreams_nas.draft.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_weights, save_pair
from dreams_nas.draft.config import DraftConfig
from dreams_nas.draft.weights import DraftWeights

_PARAMETER_NAMES = dict(
    zip(
        (*LINEAR_NAMES, "input_layernorm", "hidden_norm", "post_attention_layernorm"),
        ("q", "k", "v", "o", "gate", "up", "down", "input_norm_D", "hidden_norm_D", "post_norm_D"),
        strict=True,
    )
)


_CHOSEN_LATER = ("policy", "calibration")
"""Keys of the configuration that are set when the weights are long there."""


class DraftModel(nn.Module):
    """One draft architecture with its own weights.

    Embedding and head are the target's: `bind` takes the head's rows, decoding takes the embedding
    from the target itself.
    """

    vocab_ids_W: Tensor

    def __init__(self, config: DraftConfig, inv_freq: Tensor, vocab_ids_W: Tensor) -> None:
        """Allocate the parameters.

        Args:
            config: Architecture and target.
            inv_freq: The target's rotary frequencies.
            vocab_ids_W: Target id of each proposable token, the most frequent first.

        Raises:
            UserError: A vocabulary of another size than the architecture's.
        """
        super().__init__()
        sizes = config.sizes
        if len(vocab_ids_W) != sizes.vocab:
            raise UserError(
                f"draft vocabulary has {len(vocab_ids_W)} tokens; its architecture keeps "
                f"{config.arch.vocab:g} of {config.target_dims.vocab}, i.e. {sizes.vocab}"
            )
        self.config = config
        self.body = DraftBody(
            hidden=config.target_dims.hidden,
            num_taps=len(sizes.target_layer_ids),
            depth=config.arch.depth,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            ffn=sizes.ffn,
            inv_freq=inv_freq,
            eps=config.rms_norm_eps,
        )
        self.register_buffer("vocab_ids_W", vocab_ids_W.detach().clone())

    def weights(self, head_weight_VD: Tensor) -> DraftWeights:
        """The draft with the rows of the target's head that it can propose."""
        return self.body.weights(head_weight_VD[self.vocab_ids_W])

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by the names that serving engines use, and the vocabulary."""
        tensors: dict[str, Tensor] = {"fc.weight": self.body.fc, "norm.weight": self.body.norm_D}
        for index, layer in enumerate(self.body.layers):
            for name, field in _PARAMETER_NAMES.items():
                if (parameter := getattr(layer, field)) is not None:
                    tensors[f"layers.{index}.{name}.weight"] = parameter
        tensors["inv_freq"] = self.body.inv_freq
        tensors["vocab_ids"] = self.vocab_ids_W
        return {name: t.detach().contiguous() for name, t in tensors.items()}

    def save(self, folder: Path) -> None:
        """Write `model.safetensors` and `config.json`, as a pair that a kill cannot mix unnoticed.

        A tree chosen since the last save changes `config.json` alone: whatever the moment of a
        kill, the folder loads.
        """
        save_pair(
            folder, self.to_tensors(), self.config.model_dump(mode="json"), free=_CHOSEN_LATER
        )


def load_draft_config(folder: Path) -> DraftConfig:
    """Read what a draft checkpoint says of itself.

    Raises:
        UserError: A missing or broken file.
    """
    return build_config(DraftConfig, read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))


def load_draft(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> DraftModel:
    """Read a draft checkpoint.

    Raises:
        UserError: A missing or broken file, files of different saves, or tensors that are missing,
            unknown, of another shape than the configuration says, or not finite.
    """
    described, path = read_json(folder / CONFIG_FILE), folder / WEIGHTS_FILE
    config = build_config(DraftConfig, described, str(folder / CONFIG_FILE))
    tensors = load_weights(folder, described, "draft", device, free=_CHOSEN_LATER)
    for name in ("inv_freq", "vocab_ids"):
        if name not in tensors:
            raise UserError(f"{path} has no tensor '{name}', which every draft stores")
    model = DraftModel(config, tensors["inv_freq"], tensors["vocab_ids"]).to(device)
    expected = model.to_tensors()
    if unlike := sorted(set(expected) ^ set(tensors)):
        raise UserError(f"{path}: missing or unknown tensors {unlike}; wanted {sorted(expected)}")
    for name, own in expected.items():
        stored = tensors[name]
        if stored.shape != own.shape:
            raise UserError(
                f"{path}: tensor '{name}' has shape {list(stored.shape)}, the configuration in "
                f"{folder / CONFIG_FILE} asks for {list(own.shape)}"
            )
        if not torch.isfinite(stored).all():
            raise UserError(f"{path}: tensor '{name}' holds values that are not finite")
    ids_W = tensors["vocab_ids"]
    if len(ids_W.unique()) < len(ids_W) or not 0 <= int(ids_W.min()) <= int(ids_W.max()) < (
        config.target_dims.vocab
    ):
        raise UserError(
            f"{path}: 'vocab_ids' must name different tokens of 0..{config.target_dims.vocab - 1}"
        )
    with torch.no_grad():
        for name, own in expected.items():  # shares storage with the parameters
            own.copy_(tensors[name])
    return model.to(dtype) if dtype is not None else model
