"""What the rest of the package may ask of a target, whatever its family.

Shapes: T prompt tokens, Q verified rows, S cache capacity, F = L * D tapped features (layers side
by side, in the order asked for), D hidden, V vocabulary, M image tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dreams_nas.core.config import Config
from dreams_nas.space.arch import TargetDims


class TargetSpec(Config):
    """Who a target is: what a draft, a table or a feature store must match."""

    name: str
    """Family class and folder name, for people."""
    dims: TargetDims
    """Sizes of the text decoder."""
    tokenizer_hash: str
    """Hash of the tokenizer's serialised form; "none" for a target without one."""
    embedding_hash: str
    """Hash of the token embedding's values."""
    shape_hash: str
    """Hash of the model's config without names: equal shapes cost the same time."""
    max_positions: int
    """Longest sequence, tokens."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    rms_norm_eps: float
    """Epsilon of the decoder's norms; the draft's norms use it too."""


@dataclass(frozen=True)
class TargetInputs:
    """One prompt, ready for prefill."""

    input_ids_T: Tensor
    """Prompt tokens, image placeholders expanded, int64, on the target's device."""
    image_spans: tuple[tuple[int, int], ...] = ()
    """[start, stop) of the image tokens of each image; row and break tokens between are outside."""
    image_mask_T: Tensor | None = None
    """True where the token stands for an image feature; None without images."""
    model_inputs: Mapping[str, Any] = field(default_factory=dict)
    """What the family's own forward needs besides (pixels, grids, token types)."""


class PrefillOutput(NamedTuple):
    """What the prefill yields."""

    logits_V: Tensor
    """Logits after the last prompt token."""
    features_TF: Tensor
    """Tapped features of all prompt positions."""
    embeddings_TD: Tensor
    """Input embeddings of all prompt positions, image features merged in."""
    importance_T: Tensor | None
    """Importance of each prompt position that is an image token (0 elsewhere), rounded to 1e-4 of
    the maximum of its image; None when it was not asked for or there is no image."""


class VerifyOutput(NamedTuple):
    """What one pass over drafted rows yields."""

    logits_QV: Tensor
    features_QF: Tensor


class TargetCache(Protocol):
    """Preallocated keys and values of one sequence."""

    capacity: int
    """S: rows it can hold, verified rows of the running round included."""
    length: int
    """Committed rows."""

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last pass, in this order, and forget its others.

        Args:
            rows: Row indexes within the last pass, ascending; empty forgets the whole pass.
        """


class Target(Protocol):
    """A frozen target model. Batch 1; state of a sequence lives in its cache, never here."""

    spec: TargetSpec
    device: torch.device
    dtype: torch.dtype

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any] = ()
    ) -> TargetInputs:
        """Chat messages and images to a prompt.

        Raises:
            UserError: More tokens than the target has positions, or an image count that differs
                from the image tokens of the prompt.
        """

    def build_cache(self, capacity: int) -> TargetCache:
        """Allocate a cache of that many rows."""

    def prefill(
        self,
        inputs: TargetInputs,
        cache: TargetCache,
        *,
        target_layer_ids: Sequence[int] = (),
        want_importance: bool = False,
    ) -> PrefillOutput:
        """Run the prompt, pixels included, and commit its rows to an empty cache."""

    def verify(
        self,
        tokens_Q: Tensor,
        depths_Q: Tensor,
        mask_QQ: Tensor | None,
        cache: TargetCache,
        *,
        target_layer_ids: Sequence[int] = (),
    ) -> VerifyOutput:
        """Run rows after the committed ones, each seeing those and its ancestors.

        Args:
            tokens_Q: Token of each row, int64.
            depths_Q: Depth of each row below the committed length (the root 0), int64.
            mask_QQ: Additive float mask among the rows (0 sees, finfo.min does not), self
                included; None for a single row.
            cache: The rows are written behind its committed ones and wait for `commit`.
            target_layer_ids: Layers to tap.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of text tokens, [..., D]."""

    def head(self, states: Tensor) -> Tensor:
        """Logits of last hidden states taken before the final norm, [..., D] -> [..., V]."""

    @property
    def head_weight_VD(self) -> Tensor:
        """Weight of the language model head."""

    @property
    def inv_freq(self) -> Tensor:
        """Rotary frequencies of the decoder's (full attention) layers, [E / 2], float32."""

    def decode_text(self, tokens: Sequence[int]) -> str:
        """Tokens to text, special tokens left out."""
