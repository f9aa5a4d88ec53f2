"""Drafting policies beside static trees: grown every round by the draft's own probabilities."""

from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, model_validator

from dreams_nas.core.config import Config

PolicyName = Literal["chain", "dynamic", "adaptive"]
"""Policies that a draft can have besides the tree stored with it."""
MOST_LEVELS = 32
"""Longest path of a tree that is grown."""


class DynamicTree(Config):
    """The likeliest paths of every round: `width` guesses of each of `width` nodes a level.

    The published trees of EAGLE-2 (arXiv 2406.16858): width 10, 6 levels, 59 nodes.
    """

    num_levels: int = Field(ge=1, le=MOST_LEVELS)
    """L: most tokens a path may have."""
    width: int = Field(ge=1)
    """Nodes that are expanded on a level, and guesses of each."""
    num_nodes: int = Field(ge=1)
    """n: the likeliest nodes of all that were drafted; only they are verified."""

    @model_validator(mode="after")
    def _check_nodes(self) -> "DynamicTree":
        if self.num_nodes > self.num_drafted:
            raise ValueError(
                f"num_nodes = {self.num_nodes}: {self.num_levels} levels of width {self.width} "
                f"draft only {self.num_drafted} nodes"
            )
        return self

    @property
    def num_drafted(self) -> int:
        """Nodes that are drafted before the likeliest are kept."""
        return self.width + (self.num_levels - 1) * self.width**2

    @property
    def num_self_fed(self) -> int:
        """Self-fed draft rows of a round."""
        return (self.num_levels - 1) * self.width

    def describe(self) -> dict[str, Any]:
        """What reports print."""
        return {
            "kind": "dynamic_tree",
            "levels": self.num_levels,
            "nodes": self.num_nodes,
            "width": self.width,
        }


class LevelCalibration(Config):
    """How often paths of one length are accepted, given how likely the draft holds them."""

    log_probabilities: tuple[float, ...] = Field(min_length=1)
    """Natural logarithms of the draft's path probabilities, ascending."""
    acceptance: tuple[float, ...] = Field(min_length=1)
    """Share of such paths that the target accepts, never falling."""
    continuation: float = Field(ge=0, le=1)
    """Share of accepted and expanded paths of this length whose next token was drafted, too."""

    @model_validator(mode="after")
    def _check_order(self) -> "LevelCalibration":
        if len(self.log_probabilities) != len(self.acceptance):
            raise ValueError("log_probabilities and acceptance must be of one length")
        for name in ("log_probabilities", "acceptance"):
            values = getattr(self, name)
            if any(b < a for a, b in pairwise(values)):
                raise ValueError(f"{name} must not fall")
        return self

    @cached_property
    def lines(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Offset and slope of the map below the first knot, between each two, above the last."""
        knots, values = self.log_probabilities, self.acceptance
        offsets, slopes = [values[0]], [0.0]
        for (x, y), (next_x, next_y) in pairwise(zip(knots, values, strict=True)):
            slope = (next_y - y) / (next_x - x) if next_x > x else 0.0
            offsets.append(y - slope * x)
            slopes.append(slope)
        return (*offsets, values[-1]), (*slopes, 0.0)

    def accepted(self, log_probability: float) -> float:
        """Calibrated probability of a path that the draft scored: between knots, linear."""
        offsets, slopes = self.lines
        piece = bisect_right(self.log_probabilities, log_probability)
        return offsets[piece] + slopes[piece] * log_probability


class Calibration(Config):
    """Path probabilities of one draft, calibrated on validation prompts."""

    tree: DynamicTree
    """The tree they were gathered with; an adaptive policy drafts at most this."""
    levels: tuple[LevelCalibration, ...] = Field(min_length=1)
    """Of paths of 1, 2, ... tokens."""
    error: float = Field(ge=0, le=1)
    """Expected calibration error on prompts that were not fitted: mean distance of probability
    and frequency over ten bins, weighted by their paths."""
    num_rounds: int = Field(ge=1)
    """Rounds that were fitted."""
    tokens_per_round: float = Field(default=2.0, ge=1)
    """Tokens that a round of the whole tree would have gained there, the bonus token included."""

    def level(self, number: int) -> LevelCalibration:
        """Of paths of `number` tokens, from 1; deeper ones than were fitted go by the last."""
        return self.levels[min(number, len(self.levels)) - 1]
