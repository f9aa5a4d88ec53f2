"""The trainable parameters of a draft, at any size: shared by `DraftModel` and the supernet.

Shapes: D hidden, H query heads, K key/value heads, E head size, I feed-forward channels, F = L * D
tapped features, V vocabulary rows.
"""

import torch
from torch import Tensor, nn

from dreams_nas.draft.weights import DraftWeights, LayerWeights

LINEAR_NAMES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""In the order of the fields of `LayerWeights`, the norms left out; names as engines load them."""


class DraftLayer(nn.Module):
    """Parameters of one decoder layer; the first one reads embedding and feature side by side."""

    def __init__(
        self, hidden: int, num_heads: int, num_kv_heads: int, head_size: int, ffn: int, first: bool
    ) -> None:
        super().__init__()
        inputs = 2 * hidden if first else hidden
        shapes = {
            "q": (num_heads * head_size, inputs),
            "k": (num_kv_heads * head_size, inputs),
            "v": (num_kv_heads * head_size, inputs),
            "o": (hidden, num_heads * head_size),
            "gate": (ffn, hidden),
            "up": (ffn, hidden),
            "down": (hidden, ffn),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.input_norm_D = nn.Parameter(torch.ones(hidden))
        self.hidden_norm_D = nn.Parameter(torch.ones(hidden)) if first else None
        self.post_norm_D = nn.Parameter(torch.ones(hidden))

    def weights(self) -> LayerWeights:
        """The parameters themselves, at full size."""
        return LayerWeights(**{name: getattr(self, name) for name in LayerWeights._fields})


class DraftBody(nn.Module):
    """All that is trained of a draft: fusion, layers, final norm."""

    def __init__(
        self,
        *,
        hidden: int,
        num_taps: int,
        depth: int,
        num_heads: int,
        num_kv_heads: int,
        ffn: int,
        inv_freq: Tensor,
        eps: float,
    ) -> None:
        """Allocate the parameters; `initialise` or loading gives them values."""
        super().__init__()
        self.eps = eps
        # Not a buffer: casting the module to bf16 must not round the rotary frequencies.
        self.inv_freq = inv_freq.detach().to("cpu", torch.float32, copy=True)
        self.fc = nn.Parameter(torch.empty(hidden, num_taps * hidden))
        head_size = 2 * len(inv_freq)
        self.layers = nn.ModuleList(
            DraftLayer(hidden, num_heads, num_kv_heads, head_size, ffn, first=index == 0)
            for index in range(depth)
        )
        self.norm_D = nn.Parameter(torch.ones(hidden))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights: matrices normal with variance 1 / (3 inputs), so that depth keeps scale.

        The branches' output matrices are scaled down by the number of branches, as in GPT-2.
        """
        branches = (2 * len(self.layers)) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = (3 * parameter.shape[1]) ** -0.5
            if name.rsplit(".", 1)[-1] in ("o", "down"):
                std /= branches
            parameter.normal_(0.0, std, generator=generator)

    def weights(self, head_VD: Tensor) -> DraftWeights:
        """The whole draft, at full size.

        Args:
            head_VD: Rows of the target's head that the draft can propose, in the draft's order.
        """
        layers = tuple(layer.weights() for layer in self.layers if isinstance(layer, DraftLayer))
        return DraftWeights(self.fc, layers, self.norm_D, head_VD, self.inv_freq, self.eps)
