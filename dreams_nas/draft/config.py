"""What a draft checkpoint says of itself."""

from typing import Literal

from pydantic import Field

from dreams_nas.core.config import Config
from dreams_nas.core.errors import UserError
from dreams_nas.space.arch import DraftArch, DraftSizes, TargetDims
from dreams_nas.space.policy import Calibration
from dreams_nas.space.tree import StaticTree


class DraftConfig(Config):
    """`config.json` of a draft: its architecture and the target it belongs to."""

    schema_version: Literal["dreams-nas/draft/1"] = "dreams-nas/draft/1"
    """Format of the checkpoint."""
    arch: DraftArch
    """The point of the search space."""
    target_dims: TargetDims
    """Sizes of the target's decoder."""
    rms_norm_eps: float = Field(gt=0)
    """Epsilon of every norm."""
    target_name: str
    """Which target, for people."""
    tokenizer_hash: str
    """The target's tokenizer; a draft proposes its token ids."""
    embedding_hash: str
    """The target's embedding values; a draft shares them."""
    image_embedding: Literal["merged"] = "merged"
    """Rows of image tokens carry the target's merged image embedding."""
    policy: StaticTree | None = None
    """The draft tree chosen for this draft on the deployment it was searched for."""
    calibration: Calibration | None = None
    """Calibrated path probabilities, which an adaptive policy decides by."""

    @property
    def sizes(self) -> DraftSizes:
        """Every size of the draft's tensors."""
        return self.arch.sizes(self.target_dims)

    def require_target(self, tokenizer_hash: str, embedding_hash: str, name: str) -> None:
        """Refuse a target that this draft was not made for.

        Raises:
            UserError: Another tokenizer or another embedding.
        """
        for what, own, other in (
            ("tokenizer", self.tokenizer_hash, tokenizer_hash),
            ("token embedding", self.embedding_hash, embedding_hash),
        ):
            if own != other:
                raise UserError(
                    f"this draft belongs to target '{self.target_name}' with {what} {own}, and "
                    f"target '{name}' has {what} {other}; they must be equal: give the draft's own "
                    "target, or train a draft for this one; the same target loaded in a precision "
                    "that cannot hold its weights, as float16 for bfloat16 ones, counts as another"
                )
