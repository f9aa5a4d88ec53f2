"""How a draft is trained: losses, optimiser and budget. A named architecture has its own recipe."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dreams_nas.core.config import Config


class Recipe(Config):
    """Losses, optimiser settings and budget of one training."""

    num_unroll_levels: int = Field(default=7, ge=1, le=16)
    """Levels drafted per root in training, the committed one included. A draft is worth little
    beyond the levels it was trained for: 240 CPU seconds of the embedded target's winner gave
    acceptance lengths (and speedups predicted, ratio of sums) of 4.23 (1.82) with 4 levels, 4.81
    (1.94) with 7 and 4.71 (1.90) with 10; 70 seconds 4.20 (1.80) with 4, 4.69 (1.89) with 6 and
    4.57 (1.84) with 8."""
    level_decay: float = Field(default=1.0, gt=0, le=1)
    """Weight of level d is this to the power d - 1, (0, 1]."""
    kl_weight: float = Field(default=1.0, ge=0)
    """Weight of KL(target || draft), nats per supervised position."""
    feature_weight: float = Field(default=0.0, ge=0)
    """Weight of the SmoothL1 distance between the draft's state and the target's last state, mean
    over hidden units."""
    lr: float = Field(default=2e-3, gt=0)
    """Peak learning rate. In the same trial: 3.41 at 1e-3, 3.52 at 2e-3, 3.38 at 4e-3."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms have none."""
    grad_clip: float = Field(default=0.5, gt=0)
    """Largest norm of the whole gradient."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the budget over which the learning rate rises from 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: fall to 0 by the end of the budget, or stay."""
    average_decay: float = Field(default=0.0, ge=0, lt=1)
    """Per-step decay of an exponential average of the weights, which is the result; 0 has none."""
    batch_tokens: int = Field(default=512, gt=0)
    """Prompt and answer tokens of a batch, padding included. Small batches are the better use of a
    short budget: 40 CPU seconds of a depth-1 draft on 320 answers of 142 tokens gave a chain of 4
    an acceptance length of 2.95 at 2,048 tokens, 3.52 at 512 and 3.48 at 256."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Budget in seconds of wall time; the run ends with the first budget reached."""
    num_steps: int | None = Field(default=None, gt=0)
    """Budget in optimiser steps; runs of a step budget alone are reproducible."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of matrix products; weights, norms and losses stay in float32."""

    @model_validator(mode="after")
    def _validate_losses(self) -> Self:
        if self.kl_weight == 0 and self.feature_weight == 0:
            raise ValueError("kl_weight and feature_weight are both 0; one of them must train")
        return self

    @property
    def level_weights(self) -> tuple[float, ...]:
        """Weight of each level's positions."""
        return tuple(self.level_decay**level for level in range(self.num_unroll_levels))


NAMED_RECIPES: dict[str, Recipe] = {
    "searched": Recipe(),
    "eagle": Recipe(num_unroll_levels=1, kl_weight=0.1, feature_weight=1.0),
    "eagle3": Recipe(num_unroll_levels=7, level_decay=0.8),
}
"""Searched drafts: KL alone, seven levels, equal weights. `eagle` (arXiv 2401.15077): no unrolling,
regression of the target's last feature, a tenth of its weight on the distribution. `eagle3` (arXiv
2503.01840): no feature loss, training-time test of seven levels, each 0.8 of the one before. The
published learning rates belong to far longer training of far larger drafts; ours is one for all."""


class SupernetTrainingConfig(Config):
    """How a supernet is trained."""

    recipe: Recipe = Recipe(max_seconds=150)
    """Losses, optimiser and budget of both phases together."""
    full_share: float = Field(default=0.4, ge=0, le=1)
    """Share of the budget for phase 1, the full draft, [0, 1]."""
    num_random: int = Field(default=2, ge=0, le=16)
    """Random subnets per step of phase 2, besides the largest and the smallest."""
    num_calibration_batches: int = Field(default=8, ge=1)
    """Batches over which importance is summed."""
