"""Settings of a whole run, and of the verbs that do one stage of it."""

from typing import Literal

from pydantic import Field, model_validator

from dreams_nas.core.config import Config
from dreams_nas.core.place import PlaceConfig
from dreams_nas.distill.recipes import Recipe, SupernetTrainingConfig

BUDGETS = ("max_seconds", "num_steps")
"""Keys of a recipe that end a training."""


def _require_budget(recipe: Recipe, key: str) -> None:
    if all(getattr(recipe, unit) is None for unit in BUDGETS):
        raise ValueError(f"{key} has no budget: set max_seconds, num_steps or both")


class DataConfig(Config):
    """Prompts of the four splits; no chart or sample may be in two of them."""

    train: str = "embedded:train"
    """Supernet and drafts learn from the target's answers to these."""
    choose: str = "embedded:choose"
    """Draft trees are chosen on the answers to these."""
    score: str = "embedded:score"
    """Drafts are scored, and finalists decoded, on these."""
    test: str = "embedded:test"
    """`bench` alone sees these."""
    num_train: int = Field(default=1000, ge=1)
    """Prompts of the train split."""
    num_choose: int = Field(default=100, ge=1)
    """Prompts of the choose split."""
    num_score: int = Field(default=100, ge=1)
    """Prompts of the score split."""
    num_test: int = Field(default=50, ge=1)
    """Prompts of the test split."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Longest answer, tokens."""


class SearchConfig(Config):
    """How the space is searched."""

    num_finalists: int = Field(default=3, ge=1)
    """Best predicted drafts that are decoded before one is named."""
    num_prompts: int = Field(default=20, ge=1)
    """Prompts of the *score* split that each of them decodes."""
    max_drafts: int = Field(default=5000, ge=1)
    """Larger spaces are refused: exhaustive search evaluates every draft."""


class BaselineConfig(Config):
    """The published draft that the winner is measured against."""

    kind: Literal["none", "supernet", "alone"] = "supernet"
    """supernet: eagle3's point of the supernet, fine-tuned as long as the winner; alone: trained
    from scratch by its own recipe for the winner's total training seconds, and measured with the
    best static tree of the published size besides its tuned one."""
    num_levels: int = Field(default=8, ge=1)
    """Levels of the published tree."""
    num_nodes: int = Field(default=59, ge=1)
    """Nodes of the published tree."""


class SeededConfig(PlaceConfig):
    """A place and a seed."""

    seed: int = Field(default=0, ge=0)
    """Root seed; every stage derives its own."""


class RunConfig(SeededConfig):
    """A whole run: collect, profile, train, search, finetune, bench, export, report."""

    out: str = "runs/run"
    """Run folder; a run that was interrupted goes on there."""
    space: str = "demo"
    """Search space: a shipped name or a YAML file."""
    data: DataConfig = DataConfig()
    """Prompts."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Budget of one batch when answers are collected, tokens with padding."""
    table: str | None = None
    """Latency table of this deployment and target to use; null measures one."""
    profile_budget_s: float = Field(default=60.0, gt=0)
    """Seconds that measuring the latency table may take."""
    max_kv: int | None = Field(default=None, ge=1)
    """Most committed rows that are measured, prompt and answer; null: see `profile`."""
    train: SupernetTrainingConfig = SupernetTrainingConfig()
    """Supernet training."""
    search: SearchConfig = SearchConfig()
    """Search and finalists."""
    finetune: Recipe = Recipe(max_seconds=60)
    """Recipe and budget of the winner alone."""
    baseline: BaselineConfig = BaselineConfig()
    """What the winner is measured against."""
    num_passes: int = Field(default=3, ge=1)
    """Times that every arm decodes every test prompt."""

    @model_validator(mode="after")
    def _validate_budgets(self) -> "RunConfig":
        parts = {"train.recipe": self.train.recipe, "finetune": self.finetune}
        for key, recipe in parts.items():
            _require_budget(recipe, key)
        units = [{u for u in BUDGETS if getattr(r, u) is not None} for r in parts.values()]
        if self.baseline.kind == "alone" and not units[0] & units[1]:
            raise ValueError(
                "baseline.kind = alone trains eagle3 as long as supernet and winner together: give "
                "train.recipe and finetune budgets of one unit, max_seconds or num_steps"
            )
        return self


class TrainConfig(SeededConfig):
    """`dreams-nas train`: a supernet from collected features."""

    space: str = "demo"
    """Search space: a shipped name or a YAML file."""
    features: str = "features"
    """Feature store of the train split."""
    out: str = "supernet"
    """Folder of the supernet; an interrupted training goes on there."""
    train: SupernetTrainingConfig = SupernetTrainingConfig()
    """Recipe, budget and phases."""

    @model_validator(mode="after")
    def _validate_budget(self) -> "TrainConfig":
        _require_budget(self.train.recipe, "train.recipe")
        return self


class SearchVerbConfig(SeededConfig):
    """`dreams-nas search`: the fastest draft of a trained supernet on this deployment."""

    space: str = "demo"
    """Search space: a shipped name or a YAML file."""
    supernet: str = "supernet"
    """Folder of the supernet."""
    table: str = "table.json"
    """Latency table of this deployment."""
    choose: str = "features/choose"
    """Feature store that trees are chosen on."""
    score: str = "features/score"
    """Feature store that drafts are scored on."""
    data: str = "embedded:score"
    """Prompts of the score split, which finalists decode."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Longest answer of the finalists, tokens."""
    allow_mismatch: bool = False
    """Only warn when the table was measured elsewhere."""
    search: SearchConfig = SearchConfig()
    """Finalists and limits."""
    out: str = "search"
    """Folder of the study and its result; an interrupted search goes on there."""


class FinetuneConfig(SeededConfig):
    """`dreams-nas finetune`: one draft alone, and its tree once more."""

    space: str = "demo"
    """Search space; its policies are the ones a tree is chosen from."""
    arch: str = "search/arch.yaml"
    """Architecture file of a search, or a named architecture such as eagle3."""
    supernet: str = "supernet"
    """Folder of the supernet that the draft starts from, and whose vocabulary order it keeps."""
    from_scratch: bool = False
    """Fresh weights instead of the supernet's."""
    table: str = "table.json"
    """Latency table of this deployment."""
    allow_mismatch: bool = False
    """Only warn when the table was measured elsewhere."""
    train: str = "features/train"
    """Feature store that the draft learns from."""
    choose: str = "features/choose"
    """Feature store that its tree is chosen on."""
    score: str = "features/score"
    """Feature store that it is scored on."""
    recipe: Recipe = Recipe(max_seconds=60)
    """Losses, optimiser and budget."""
    out: str = "draft"
    """Folder of the draft; an interrupted training goes on there."""

    @model_validator(mode="after")
    def _validate_budget(self) -> "FinetuneConfig":
        _require_budget(self.recipe, "recipe")
        return self
