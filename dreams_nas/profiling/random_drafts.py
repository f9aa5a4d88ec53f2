"""Drafts of exact sizes with random weights: what they say is nonsense, what they cost is not.

All of them share what a round does not tell apart: one permuted copy of the target's head, whose
prefixes are the vocabularies, one rotary table, and the layers of each size.

Shapes: D hidden, V vocabulary, W kept vocabulary, F tapped features.
"""

import torch
from torch import Tensor

from dreams_nas.decode.drafting import ReadyDraft
from dreams_nas.draft.body import DraftBody
from dreams_nas.draft.layers import Rotary, build_rotary
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.space.arch import DraftArch
from dreams_nas.targets.protocol import Target

SLOPE_DEPTH = 3
"""Layers of the deeper draft between which and a single layer the slope is taken."""


class RandomDrafts:
    """Builds drafts for one target; keeps what it built."""

    def __init__(self, target: Target, seed: int, max_depth: int) -> None:
        """Copy the head's rows in a random order, as a frequency order is one to the hardware.

        Args:
            target: Whose drafts they are.
            seed: Of weights and order.
            max_depth: Layers of the deepest draft that will be asked for.
        """
        self._target = target
        self._generator = torch.Generator().manual_seed(seed)
        self._num_layers = max_depth if max_depth == 1 else max(max_depth, SLOPE_DEPTH)
        dims = target.spec.dims
        ids_V = torch.randperm(dims.vocab, generator=self._generator).to(target.device)
        self._ids_V = ids_V
        self._head_VD = target.head_weight_VD.detach()[ids_V]
        positions = torch.arange(target.spec.max_positions, device=target.device)
        self._rotary: Rotary = build_rotary(target.inv_freq, positions, target.dtype)
        self._weights: dict[tuple[int, int], DraftWeights] = {}
        self._fc: dict[int, Tensor] = {}

    @property
    def rotary(self) -> Rotary:
        """Of every position, [S, E]."""
        return self._rotary

    def weights(
        self, num_kv_heads: int, ffn: int, depth: int, *, num_taps: int, vocab: int
    ) -> DraftWeights:
        """The tensors of a draft of these sizes."""
        size = (num_kv_heads, ffn)
        if size not in self._weights:
            self._weights[size] = self._build(num_kv_heads, ffn)
        weights = self._weights[size]
        return weights._replace(
            fc=self._fusion(num_taps), layers=weights.layers[:depth], head_VD=self._head_VD[:vocab]
        )

    def ready(self, arch: DraftArch) -> ReadyDraft:
        """A draft of this architecture, ready to decode."""
        sizes = arch.sizes(self._target.spec.dims)
        return ReadyDraft(
            weights=self.weights(
                sizes.num_kv_heads,
                sizes.ffn,
                arch.depth,
                num_taps=len(sizes.target_layer_ids),
                vocab=sizes.vocab,
            ),
            vocab_ids_W=self._ids_V[: sizes.vocab],
            target_layer_ids=sizes.target_layer_ids,
            keep_ratio=arch.keep_ratio,
            rotary=self._rotary,
        )

    def vocab_ids(self, vocab: int) -> Tensor:
        """Target ids of the first head rows, [W]."""
        return self._ids_V[:vocab]

    def normal(self, *shape: int) -> Tensor:
        """Standard normal values on the target's device, in its dtype."""
        values = torch.randn(shape, generator=self._generator)
        return values.to(self._target.device, self._target.dtype)

    def tokens(self, num_tokens: int) -> Tensor:
        """Token ids, int64, none of which stands for an image."""
        ids_T = torch.randint(
            self._target.spec.dims.vocab, (num_tokens,), generator=self._generator
        )
        image_id = getattr(self._target, "image_token_id", None)
        if image_id is not None:
            ids_T[ids_T == image_id] = 0 if image_id != 0 else 1
        return ids_T.to(self._target.device)

    def _build(self, num_kv_heads: int, ffn: int) -> DraftWeights:
        target, dims = self._target, self._target.spec.dims
        body = DraftBody(
            hidden=dims.hidden,
            num_taps=1,
            depth=self._num_layers,
            num_heads=num_kv_heads * (dims.num_heads // dims.num_kv_heads),
            num_kv_heads=num_kv_heads,
            ffn=ffn,
            inv_freq=target.inv_freq,
            eps=target.spec.rms_norm_eps,
        )
        body.initialise(self._generator)
        return body.requires_grad_(False).to(target.device, target.dtype).weights(self._head_VD)

    def _fusion(self, num_taps: int) -> Tensor:
        hidden = self._target.spec.dims.hidden
        if num_taps not in self._fc:
            scale = (num_taps * hidden) ** -0.5
            self._fc[num_taps] = self.normal(hidden, num_taps * hidden) * scale
        return self._fc[num_taps]
