"""What `profile` is told; free of torch, so that `--help` shows it at once."""

from pathlib import Path

from pydantic import Field, field_validator

from dreams_nas.core.device import Mode
from dreams_nas.core.place import PlaceConfig
from dreams_nas.profiling.timers import TimerConfig


class ProfileConfig(PlaceConfig):
    """What is measured, and for how long."""

    space: str = "demo"
    """Search space whose drafts will be priced: a shipped name or a YAML file."""
    out: Path = Path("runs/profile")
    """Folder that `table.json` is written to."""
    mode: Mode = "eager"
    """How a step runs; only eager can be measured."""
    seed: int = Field(default=0, ge=0)
    """Root seed: weights of the measured drafts, order of the sweeps, validation cases."""
    max_kv: int | None = Field(default=None, ge=1)
    """Most committed rows, prompt and answer; null for half of the target's positions, at most
    2,048."""
    max_q: int | None = Field(default=None, ge=2)
    """Most rows of a verification, n + 1; null for what the space's policies need."""
    budget_s: float = Field(default=60.0, gt=0)
    """Seconds that measuring may take, validation included; loading the target is not counted. On a
    busy machine it may be about a third more, or as long as measuring everything once takes."""
    num_random_drafts: int = Field(default=4, ge=0)
    """Drafts of the space that the table is judged by; the space's two corners, which it was built
    with, are reported beside them."""
    timer: TimerConfig = TimerConfig()
    """Repeats and gates."""

    @field_validator("mode", mode="after")
    @classmethod
    def _validate_mode(cls, value: Mode) -> Mode:
        if value != "eager":
            raise ValueError(
                "only eager passes can be measured so far, and times of different modes never "
                "mix in one table; use eager"
            )
        return value
