"""One set of parameters that holds every draft of a search space.

A subnet is made of views: its matrices are the first rows and columns of the shared ones, so that a
step on a subnet trains the shared weights. The architecture is an argument, never a state.
Once-for-all (arXiv 1908.09791) calls this elastic width and depth.

Shapes: D hidden, E head size, V target vocabulary, W kept vocabulary.
"""

import torch
from torch import Tensor, nn

from dreams_nas.core.errors import UserError
from dreams_nas.draft.body import DraftBody, DraftLayer
from dreams_nas.draft.config import DraftConfig
from dreams_nas.draft.model import DraftModel
from dreams_nas.draft.weights import DraftWeights, LayerWeights
from dreams_nas.space.arch import DraftArch, TargetDims


class Supernet(nn.Module):
    """The full draft of a target, deep as the space's deepest and reading all of its taps.

    It has the target's heads and feed-forward width; smaller subnets are prefixes of it.
    """

    head_VD: Tensor
    vocab_order_V: Tensor

    def __init__(
        self,
        dims: TargetDims,
        *,
        tap_layer_ids: tuple[int, ...],
        depth: int,
        inv_freq: Tensor,
        eps: float,
        head_weight_VD: Tensor,
        vocab_order_V: Tensor,
    ) -> None:
        """Allocate the parameters.

        Args:
            dims: Sizes of the target.
            tap_layer_ids: Union of the space's taps, ascending; a column block of `fc` each.
            depth: Layers of the deepest subnet.
            inv_freq: The target's rotary frequencies.
            eps: Epsilon of the norms.
            head_weight_VD: The target's head, shared and frozen.
            vocab_order_V: All token ids, the most frequent first: a vocabulary is a prefix.
        """
        super().__init__()
        self.dims = dims
        self.tap_layer_ids = tap_layer_ids
        self.body = DraftBody(
            hidden=dims.hidden,
            num_taps=len(tap_layer_ids),
            depth=depth,
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            ffn=dims.ffn,
            inv_freq=inv_freq,
            eps=eps,
        )
        self.register_buffer("vocab_order_V", vocab_order_V.detach().clone())
        self.register_buffer(
            "head_VD", head_weight_VD.detach()[vocab_order_V].clone(), persistent=False
        )

    def weights(self, arch: DraftArch) -> DraftWeights:
        """Views of the shared parameters that make up a subnet; gradients flow into them.

        Raises:
            UserError: The subnet is deeper, or reads other layers, than this supernet.
        """
        sizes = arch.sizes(self.dims)
        if arch.depth > len(self.body.layers):
            raise UserError(
                f"depth {arch.depth} is outside this supernet, which has {len(self.body.layers)} "
                "layers; train one with a deeper search space"
            )
        if missing := set(sizes.target_layer_ids) - set(self.tap_layer_ids):
            raise UserError(
                f"tap '{arch.tap}' reads target layers {sorted(missing)}, and this supernet was "
                f"trained on layers {list(self.tap_layer_ids)}; choose a tap within them"
            )
        q_rows = sizes.num_heads * self.dims.head_size
        kv_rows = sizes.num_kv_heads * self.dims.head_size
        layers = tuple(
            _slice_layer(layer.weights(), q_rows, kv_rows, sizes.ffn)
            for layer in self.body.layers[: arch.depth]
            if isinstance(layer, DraftLayer)
        )
        full = self.body.weights(self.head_VD[: sizes.vocab])
        return full._replace(fc=self._fc(sizes.target_layer_ids), layers=layers)

    def _fc(self, target_layer_ids: tuple[int, ...]) -> Tensor:
        """Column blocks of these layers, in their order."""
        if target_layer_ids == self.tap_layer_ids:
            return self.body.fc
        blocks = self.body.fc.split(self.dims.hidden, dim=1)
        return torch.cat([blocks[self.tap_layer_ids.index(k)] for k in target_layer_ids], dim=1)

    @torch.no_grad()
    def extract(self, config: DraftConfig) -> DraftModel:
        """The subnet as a draft of its own, every tensor copied."""
        views = self.weights(config.arch)
        ids_W = self.vocab_order_V[: config.sizes.vocab]
        draft = DraftModel(config, self.body.inv_freq, ids_W).to(self.body.fc)
        own = draft.body.weights(views.head_VD)
        own.fc.copy_(views.fc)
        own.norm_D.copy_(views.norm_D)
        for own_layer, view_layer in zip(own.layers, views.layers, strict=True):
            for target, source in zip(own_layer, view_layer, strict=True):
                if target is not None and source is not None:
                    target.copy_(source)
        return draft


def _slice_layer(full: LayerWeights, q_rows: int, kv_rows: int, ffn: int) -> LayerWeights:
    """Whole key/value groups with their query heads, and feed-forward channels, as prefixes."""
    return full._replace(
        q=full.q[:q_rows],
        k=full.k[:kv_rows],
        v=full.v[:kv_rows],
        o=full.o[:, :q_rows],
        gate=full.gate[:ffn],
        up=full.up[:ffn],
        down=full.down[:, :ffn],
    )
