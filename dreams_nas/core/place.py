"""Which target on which device: the part of a config that every verb has in common."""

from pydantic import Field

from dreams_nas.core.config import Config
from dreams_nas.core.device import Attention, Dtype


class PlaceConfig(Config):
    """Which target, where it runs."""

    target: str = "embedded"
    """`embedded`, a folder in the form of Hugging Face, or a hub id."""
    device: str = "auto"
    """auto, cpu or cuda:N."""
    dtype: Dtype = "float32"
    """Precision of target and draft."""
    attention: Attention = "sdpa"
    """Attention backend of the target."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of one operation; null: OMP_NUM_THREADS, or all cores."""
