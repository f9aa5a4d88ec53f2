"""One point of the search space: a `DraftArch`, and the sizes it takes on a given target."""

import math
from typing import Literal

from pydantic import Field

from dreams_nas.core.config import Config
from dreams_nas.core.errors import UserError

TapName = Literal["last", "0.25", "0.5", "0.75", "three"]
"""Which target layers feed the draft; see `tap_layer_ids`."""


def round_half_up(value: float) -> int:
    """Nearest integer, halves upwards (Python's own `round` goes to the even neighbour)."""
    return math.floor(value + 0.5)


def tap_layer_ids(tap: TapName, num_layers: int) -> tuple[int, ...]:
    """Target layers that a tap reads; id k is the output of block k, counted from 0.

    Of L blocks `last` is L - 1 and a fraction f is max(0, round half up(f L) - 1). `three` is the
    published 1, L // 2 - 1, L - 4 from 12 blocks on and the three quarters below that.

    Raises:
        UserError: Two of the three taps coincide on so shallow a target.
    """
    if tap == "last":
        return (num_layers - 1,)
    if tap != "three":
        return (max(0, round_half_up(float(tap) * num_layers) - 1),)
    ids: tuple[int, ...]
    if num_layers >= 12:
        ids = (1, num_layers // 2 - 1, num_layers - 4)
    else:
        ids = tuple(max(0, round_half_up(f * num_layers) - 1) for f in (0.25, 0.5, 0.75))
    if len(set(ids)) < len(ids):
        raise UserError(
            f"tap 'three' reads layers {list(ids)} of a target with {num_layers} blocks, and they "
            "must differ; choose tap 'last', '0.25', '0.5' or '0.75' for so shallow a target"
        )
    return ids


class TargetDims(Config):
    """The sizes of a target's text decoder, as far as a draft depends on them."""

    hidden: int = Field(gt=0)
    """Width of the residual stream, units."""
    num_layers: int = Field(gt=0)
    """Decoder blocks."""
    num_heads: int = Field(gt=0)
    """Query heads."""
    num_kv_heads: int = Field(gt=0)
    """Key/value heads; a group is one of them with its query heads."""
    head_size: int = Field(gt=0)
    """Width of one head, units."""
    ffn: int = Field(gt=0)
    """Inner width of the feed-forward block, channels."""
    vocab: int = Field(gt=0)
    """Rows of the target's head, tokens."""


class DraftSizes(Config):
    """What an architecture comes to on a target: every number a draft's tensors depend on."""

    target_layer_ids: tuple[int, ...]
    """Tapped target layers, ascending; id k is the output of block k."""
    num_kv_heads: int
    """Key/value heads kept, whole groups."""
    num_heads: int
    """Query heads kept."""
    ffn: int
    """Feed-forward channels kept."""
    vocab: int
    """Head rows kept, the most frequent tokens first."""


class DraftArch(Config):
    """A draft architecture: one choice for every dimension of the space. Hashable."""

    interaction: Literal["fuse"] = "fuse"
    """How target features enter the draft."""
    tap: TapName = "three"
    """Which target layers feed the draft."""
    depth: int = Field(default=1, ge=1, le=16)
    """Decoder layers of the draft."""
    head_ratio: float = Field(default=1.0, gt=0, le=1)
    """Share of key/value groups kept, (0, 1]."""
    ffn_ratio: float = Field(default=1.0, gt=0, le=1)
    """Share of feed-forward channels kept, (0, 1]."""
    keep_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the image tokens that the draft sees, [0, 1]."""
    vocab: float = Field(default=1.0, gt=0, le=1)
    """Share of the target's vocabulary the draft can propose, (0, 1]."""

    @property
    def key(self) -> str:
        """Short text that is equal for equal drafts, fit for a file name."""
        return (
            f"{self.interaction}-{self.tap}-d{self.depth}-h{self.head_ratio:g}-f{self.ffn_ratio:g}"
            f"-k{self.keep_ratio:g}-v{self.vocab:g}"
        )

    @property
    def body_key(self) -> str:
        """`key` without the vocabulary: drafts that differ in it alone share every hidden state."""
        return self.key.rsplit("-v", 1)[0]

    def sizes(self, dims: TargetDims) -> DraftSizes:
        """The tensors' sizes on a target of these dimensions.

        Raises:
            UserError: The tap cannot be read on so shallow a target.
        """
        num_kv_heads = max(1, round_half_up(self.head_ratio * dims.num_kv_heads))
        return DraftSizes(
            target_layer_ids=tap_layer_ids(self.tap, dims.num_layers),
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * (dims.num_heads // dims.num_kv_heads),
            ffn=max(1, round_half_up(self.ffn_ratio * dims.ffn)),
            vocab=max(1, round_half_up(self.vocab * dims.vocab)),
        )


NAMED_ARCHS: dict[str, DraftArch] = {
    "eagle": DraftArch(tap="last"),
    "eagle3": DraftArch(tap="three"),
    "hivis": DraftArch(tap="three", keep_ratio=0.0),
}
"""Published drafts as points of the space (`paper_facts.md`); their recipes are in `distill`."""
