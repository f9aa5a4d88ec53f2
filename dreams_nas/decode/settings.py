"""How tokens are chosen and answers end, under the names of transformers' generation config."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dreams_nas.core.config import Config
from dreams_nas.core.place import PlaceConfig
from dreams_nas.space.policy import PolicyName

Acceptance = Literal["match", "residual", "block"]
"""How drafted tokens are accepted when sampling: see `GenerationSettings.acceptance`."""


class GenerationSettings(Config):
    """What the next token is drawn from; plain and speculative decoding share it.

    Settings that are null fall back to the target's own generation config, then to neutral.
    """

    do_sample: bool = False
    """Draw tokens at random; otherwise the likeliest one is taken."""
    temperature: float | None = Field(default=None, ge=0)
    """Divides the logits before sampling; 0 is greedy."""
    top_k: int | None = Field(default=None, ge=0)
    """Keeps the likeliest tokens only; 0 keeps all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keeps the likeliest tokens up to this share of the probability."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Keeps tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Lowers the logits of tokens that the prompt or the answer holds; 1 does nothing."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end the answer; the one that does stays in it."""
    acceptance: Acceptance = "match"
    """When sampling, `match` keeps a drafted token that the target's own draw equals (any tree);
    `residual` and `block` draw the draft's tokens, too, and keep more of them (chains only)."""

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn: asked for, and not at temperature 0."""
        return self.do_sample and self.temperature != 0

    @property
    def idle(self) -> tuple[str, ...]:
        """Settings that were given and change nothing, because nothing is drawn."""
        if self.do_sample:
            return ()
        given = [n for n in ("temperature", "top_k", "top_p", "min_p") if getattr(self, n)]
        return (*given, *(["acceptance"] if self.acceptance != "match" else []))

    @property
    def draws_drafts(self) -> bool:
        """Whether the draft's tokens are drawn, too."""
        return self.is_random and self.acceptance != "match"

    def describe(self) -> dict[str, Any]:
        """The effective settings, for reports: what changes nothing is left out."""
        penalty = self.repetition_penalty
        found: dict[str, Any] = {} if penalty in (None, 1) else {"repetition_penalty": penalty}
        if self.is_random:
            neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
            values = {name: getattr(self, name) for name in neutral}
            found |= {k: v for k, v in values.items() if v is not None and v != neutral[k]}
            found["acceptance"] = self.acceptance
        if self.stop_strings:
            found["stop_strings"] = list(self.stop_strings)
        return {"do_sample": self.is_random, **found}


GREEDY = GenerationSettings()
"""The likeliest token, lowest id first among equals."""


class GenerateConfig(PlaceConfig, GenerationSettings):
    """Everything that `generate` needs."""

    draft: str | None = None
    """Folder of a draft; null decodes plainly."""
    chain: int | None = Field(default=None, ge=1, le=64)
    """Levels of a chain to draft instead of the draft's own tree."""
    policy: PolicyName | None = None
    """Policy instead of the draft's own tree."""
    table: str | None = None
    """Latency table of this deployment; `adaptive` decides by it."""
    allow_mismatch: bool = False
    """Only warn when the table was measured elsewhere."""
    images: tuple[str, ...] = ()
    """Image files, shown before the prompt in this order."""
    prompt: str = ""
    """What to ask."""
    max_new_tokens: int = Field(default=128, ge=0)
    """Most tokens of the answer."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the random numbers that sampling draws."""
    trace: str | None = None
    """JSON file that the rounds are written to; null writes none."""

    @model_validator(mode="after")
    def _check_policy(self) -> "GenerateConfig":
        if self.policy is not None and self.chain is not None:
            raise ValueError(
                f"chain = {self.chain} and policy = '{self.policy}' each say what is drafted; "
                "leave one out"
            )
        if self.policy == "adaptive" and self.table is None and self.draft is not None:
            raise ValueError(
                "policy 'adaptive' decides by measured costs; give --table FILE, which "
                "`dreams-nas profile` writes"
            )
        return self

    @property
    def settings(self) -> GenerationSettings:
        """How tokens are chosen."""
        return GenerationSettings(
            **{name: getattr(self, name) for name in GenerationSettings.model_fields}
        )
