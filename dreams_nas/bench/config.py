"""Settings of `bench`, `calibrate` and `report`."""

from typing import Literal

from pydantic import Field

from dreams_nas.core.config import Config
from dreams_nas.core.place import PlaceConfig
from dreams_nas.space.policy import PolicyName

Reference = Literal["generate", "prompt_lookup"]


class MeasureConfig(Config):
    """How arms are timed."""

    max_new_tokens: int = Field(default=128, ge=2)
    """Most tokens of an answer."""
    num_passes: int = Field(default=3, ge=1)
    """Times that every arm decodes every prompt; the median counts."""
    num_warmup: int = Field(default=2, ge=0)
    """Prompts that every arm decodes before the clock counts."""


class BenchConfig(MeasureConfig, PlaceConfig):
    """Everything that `bench` needs."""

    drafts: dict[str, str] = Field(default_factory=dict)
    """Folder of each draft by the name of its arm; `winner` and `eagle3` are compared."""
    chain: int | None = Field(default=None, ge=1, le=64)
    """Levels of a chain that every draft drafts instead of its own tree."""
    policies: tuple[PolicyName, ...] = ()
    """Further policies of the winner that are timed beside its own tree."""
    references: tuple[Reference, ...] = ("generate", "prompt_lookup")
    """transformers' own ways to decode that are timed beside ours."""
    data: str = "embedded:test"
    """Prompts: `embedded:test` or a file of conversations."""
    num_prompts: int = Field(default=50, ge=1)
    """Prompts that are decoded."""
    table: str | None = None
    """Latency table of this deployment; with it the speedup is predicted, too."""
    allow_mismatch: bool = False
    """Only warn when the table was measured elsewhere."""
    seed: int = Field(default=0, ge=0)
    """Root seed; generated prompts are those of a run with this seed."""
    out: str | None = None
    """Folder for bench.json, prompts.csv and summary.md; null writes none."""


class CalibrateConfig(PlaceConfig):
    """Everything that `calibrate` needs."""

    draft: str = ""
    """Folder of the draft; its config.json gets the calibration."""
    data: str = "embedded:choose"
    """Validation prompts: `embedded:choose` or a file of conversations."""
    num_prompts: int = Field(default=60, ge=3)
    """Prompts that are decoded; every third measures the error."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Most tokens of an answer."""
    num_levels: int = Field(default=8, ge=1)
    """Levels of the tree that gathers the paths; an adaptive policy drafts at most this."""
    width: int = Field(default=3, ge=1)
    """Nodes expanded on a level, and guesses of each."""
    num_nodes: int = Field(default=24, ge=1)
    """Nodes verified at most."""
    seed: int = Field(default=0, ge=0)
    """Root seed; generated prompts are those of a run with this seed."""


class ReportConfig(Config):
    """Everything that `report` needs."""

    run_dir: str = ""
    """Folder of a run."""
    out: str | None = None
    """Folder for the page and its plots; null is `report` inside the run folder."""
