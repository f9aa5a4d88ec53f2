"""Settings of `bench`, `generate` and `report`."""

from typing import Any, TypeVar

from pydantic import Field

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.place import PlaceConfig

C = TypeVar("C", bound=Config)


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
    chain: int | None = Field(default=None, ge=1)
    """Levels of a chain that every draft drafts instead of its own tree."""
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


class GenerateConfig(PlaceConfig):
    """Everything that `generate` needs."""

    draft: str | None = None
    """Folder of a draft; null decodes plainly."""
    chain: int | None = Field(default=None, ge=1)
    """Levels of a chain to draft instead of the draft's own tree."""
    images: tuple[str, ...] = ()
    """Image files, shown before the prompt in this order."""
    prompt: str = ""
    """What to ask."""
    max_new_tokens: int = Field(default=128, ge=0)
    """Most tokens of the answer."""


class ReportConfig(Config):
    """Everything that `report` needs."""

    run_dir: str = ""
    """Folder of a run."""
    out: str | None = None
    """Folder for the page and its plots; null is `report` inside the run folder."""


def with_given(config: C, **values: Any) -> C:
    """A copy with the values that were given (not None), checked like a config file's.

    Raises:
        UserError: A value breaks a rule of its field.
    """
    given = {key: value for key, value in values.items() if value is not None}
    data = {**config.model_dump(mode="json"), **given}
    return build_config(type(config), data, "the command line", {k: f"--{k}" for k in given})
