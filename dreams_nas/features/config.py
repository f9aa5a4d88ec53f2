"""What collecting takes; read without torch, so that `collect --help` is quick."""

from pydantic import Field

from dreams_nas.core.config import Config
from dreams_nas.core.device import Dtype
from dreams_nas.core.place import PlaceConfig
from dreams_nas.space.arch import TapName, tap_layer_ids


class CollectConfig(Config):
    """How answers and features are recorded."""

    taps: tuple[TapName, ...] = Field(default=("last", "three"), min_length=1)
    """Taps whose target layers are recorded; the last block always is."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest answer, tokens."""
    max_length: int | None = Field(default=None, ge=2)
    """Longest prompt with its longest answer, tokens; null: the target's positions."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Budget of one batch, tokens with padding; a longer sample makes a batch alone."""
    store_dtype: Dtype | None = None
    """Precision on disk; null: the target's own."""
    shard_size: int = Field(default=64, ge=1)
    """Samples per file; what a killed run has to do again at most."""

    def target_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """Layers to record of a target with that many blocks, ascending.

        Raises:
            UserError: A tap cannot be read on so shallow a target.
        """
        ids = {k for tap in self.taps for k in tap_layer_ids(tap, num_layers)}
        return tuple(sorted(ids | {num_layers - 1}))


class CollectVerbConfig(CollectConfig, PlaceConfig):
    """`dreams-nas collect`: which target answers what, and where the features go."""

    data: str = "embedded:train"
    """Prompts: embedded:train (or choose, score, test), or a .jsonl or .json file."""
    count: int | None = Field(default=None, ge=1)
    """Number of prompts, the first of a file; null: all of a file, or 960 generated ones."""
    out: str = "features"
    """Folder of the feature store."""
    seed: int = Field(default=0, ge=0)
    """Root seed, of generated prompts."""

    @property
    def collect(self) -> CollectConfig:
        """The part that the store depends on."""
        names = CollectConfig.model_fields
        return CollectConfig(**{name: getattr(self, name) for name in names})
