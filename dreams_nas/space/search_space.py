"""The search space: which choices each dimension has, and every draft they make together."""

import itertools
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, field_validator, model_validator

from dreams_nas.core.config import Config, config_hash, load_config
from dreams_nas.core.errors import UserError, unknown_error
from dreams_nas.space.arch import DraftArch, TapName, TargetDims

DIMENSIONS: tuple[str, ...] = tuple(DraftArch.model_fields)
"""Names of the dimensions, in the order of a genome; drafts alike but for the last one, the
vocabulary, are neighbours in `SearchSpace.enumerate` and share every hidden state."""

_TAP_ORDER: tuple[TapName, ...] = ("three", "last", "0.75", "0.5", "0.25")
"""Largest first. Two taps that read the same layers of a target go by the first of their names."""

Ratio = Annotated[float, Field(gt=0, le=1)]


def _tap_name(value: Any) -> Any:
    """YAML reads the tap `0.25` as a number; its name is text."""
    return f"{value:g}" if isinstance(value, float) else value


class PolicySpace(Config):
    """Which drafting policies may be chosen inside each draft."""

    kind: Literal["static_tree", "chain"] = "static_tree"
    """static_tree: the best tree of each size; chain: the draft's best guess at every level."""
    levels: tuple[int, int] = (0, 9)
    """Least and most levels L, counted with the first; 0 allows the answer "do not speculate"."""
    nodes: tuple[int, int] = (1, 59)
    """Least and most nodes n of a tree that speculates, the root not counted."""

    @field_validator("levels", "nodes", mode="after")
    @classmethod
    def _validate_range(cls, value: tuple[int, int]) -> tuple[int, int]:
        low, high = value
        if low < 0 or high < max(low, 1):
            raise ValueError("a range is [least, most] with 0 <= least <= most and most >= 1")
        return value

    @model_validator(mode="after")
    def _validate_policy(self) -> "PolicySpace":
        (least_levels, most_levels), (least_nodes, most_nodes) = self.levels, self.nodes
        if least_levels > most_nodes:
            raise ValueError(
                f"levels = {list(self.levels)} need a node each, but nodes = {list(self.nodes)}"
            )
        if self.kind == "chain" and least_nodes > most_levels:
            raise ValueError(
                f"a chain has one node per level: levels = {list(self.levels)} and nodes = "
                f"{list(self.nodes)} have no size in common"
            )
        return self


class SearchSpace(Config):
    """Choices of every dimension of a `DraftArch`, and the policies searched inside each draft.

    A dimension that is left out has the one choice that a `DraftArch` defaults to.
    """

    interaction: tuple[Literal["fuse"], ...] = ("fuse",)
    """How target features enter the draft."""
    tap: tuple[Annotated[TapName, BeforeValidator(_tap_name)], ...] = ("three",)
    """Which target layers feed the draft."""
    depth: tuple[Annotated[int, Field(ge=1, le=16)], ...] = (1,)
    """Decoder layers of the draft."""
    head_ratio: tuple[Ratio, ...] = (1.0,)
    """Shares of key/value groups kept, (0, 1]."""
    ffn_ratio: tuple[Ratio, ...] = (1.0,)
    """Shares of feed-forward channels kept, (0, 1]."""
    keep_ratio: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (1.0,)
    """Shares of the image tokens that the draft sees, [0, 1]."""
    vocab: tuple[Ratio, ...] = (1.0,)
    """Shares of the target's vocabulary that the draft can propose, (0, 1]."""
    policy: PolicySpace = PolicySpace()
    """Drafting policies, as ranges."""

    @field_validator(*DIMENSIONS, mode="after")
    @classmethod
    def _validate_choices(cls, choices: tuple[Any, ...]) -> tuple[Any, ...]:
        if not choices:
            raise ValueError("a dimension needs at least one choice; leave it out for the default")
        if len(set(choices)) < len(choices):
            raise ValueError("names a choice twice")
        # Numbers ascend whatever the order in the file, so that equal spaces have one hash.
        if isinstance(choices[0], str):
            return choices
        return tuple(sorted(choices))

    @property
    def hash(self) -> str:
        """Short hash of choices and policies."""
        return config_hash(self)

    def choices(self, dimension: str) -> tuple[Any, ...]:
        """Choices of one dimension; numbers ascend, names keep the order of the file."""
        return tuple(getattr(self, dimension))

    @property
    def size(self) -> int:
        """Number of genomes; `enumerate` yields fewer where some are equal on a target."""
        return int(np.prod([len(self.choices(name)) for name in DIMENSIONS]))

    def validate_for(self, dims: TargetDims) -> None:
        """Refuse a choice that this target cannot realise.

        Raises:
            UserError: Names field, value and rule.
        """
        if dims.num_heads % dims.num_kv_heads:
            raise UserError(
                f"head_ratio keeps whole key/value groups, but {dims.num_heads} query heads do "
                f"not divide into {dims.num_kv_heads} groups; such a target is not supported"
            )
        for tap in self.tap:
            try:
                DraftArch(tap=tap).sizes(dims)
            except UserError as error:
                raise UserError(f"search space, tap = {tap}: {error}") from error

    def canonical(self, arch: DraftArch, dims: TargetDims) -> DraftArch:
        """The draft by the one name it has on this target.

        Ratios that keep equally many groups, channels or tokens, and taps that read the same
        layers, make equal drafts; they go by the largest such choice of the space.
        """
        return self._rename(arch, self._canonical_choices(dims))

    def _canonical_choices(self, dims: TargetDims) -> dict[str, dict[Any, Any]]:
        """For each dimension with sizes: the largest choice that equals each choice."""
        renames: dict[str, dict[Any, Any]] = {}
        for name in ("tap", "head_ratio", "ffn_ratio", "vocab"):
            first: dict[Any, Any] = {}
            renames[name] = {}
            for choice in self._largest_first(name):
                sizes = DraftArch(**{"tap": self.tap[0], name: choice}).sizes(dims)
                renames[name][choice] = first.setdefault(sizes, choice)
        return renames

    def _rename(self, arch: DraftArch, renames: dict[str, dict[Any, Any]]) -> DraftArch:
        values = {name: getattr(arch, name) for name in renames}
        new = {name: renames[name].get(value, value) for name, value in values.items()}
        return arch if new == values else arch.replace(**new)

    def enumerate(self, dims: TargetDims | None = None) -> list[DraftArch]:
        """Every draft of the space once, in an order that depends on the space alone.

        Args:
            dims: The target; with it, genomes that are equal drafts there are merged.
        """
        archs = self._product()
        if dims is None:
            return list(archs)
        renames = self._canonical_choices(dims)
        return list(dict.fromkeys(self._rename(arch, renames) for arch in archs))

    def _product(self) -> Iterator[DraftArch]:
        for values in itertools.product(*(self.choices(name) for name in DIMENSIONS)):
            yield DraftArch(**dict(zip(DIMENSIONS, values, strict=True)))

    def contains(self, arch: DraftArch) -> bool:
        """Whether every choice of the draft is one of the space's."""
        return all(getattr(arch, name) in self.choices(name) for name in DIMENSIONS)

    def require(self, arch: DraftArch) -> None:
        """Refuse a draft from outside the space.

        Raises:
            UserError: Names the field, its value and the choices.
        """
        for name in DIMENSIONS:
            value, choices = getattr(arch, name), self.choices(name)
            if value not in choices:
                raise UserError(
                    f"{name} = {value} of draft {arch.key} is not in the search space; choices: "
                    f"{', '.join(str(choice) for choice in choices)}"
                )

    def encode(self, arch: DraftArch) -> tuple[int, ...]:
        """The draft as indexes of its choices, in the order of `DIMENSIONS`."""
        self.require(arch)
        return tuple(self.choices(name).index(getattr(arch, name)) for name in DIMENSIONS)

    def decode(self, genome: tuple[int, ...]) -> DraftArch:
        """The draft of these indexes; inverse of `encode`.

        Raises:
            UserError: Too few or many genes, or an index without a choice.
        """
        if len(genome) != len(DIMENSIONS):
            raise UserError(f"a genome has {len(DIMENSIONS)} genes, got {len(genome)}")
        values = {}
        for name, gene in zip(DIMENSIONS, genome, strict=True):
            choices = self.choices(name)
            if not 0 <= gene < len(choices):
                raise UserError(
                    f"gene {gene} of {name} is outside 0..{len(choices) - 1} (its choices)"
                )
            values[name] = choices[gene]
        return DraftArch(**values)

    def sample(self, rng: np.random.Generator) -> DraftArch:
        """One draft, each dimension drawn uniformly from its choices."""
        return self.decode(tuple(int(rng.integers(len(self.choices(d)))) for d in DIMENSIONS))

    def largest(self) -> DraftArch:
        """The draft with the most of everything; of the taps, `three` where it is a choice."""
        return DraftArch(**{name: self._largest_first(name)[0] for name in DIMENSIONS})

    def smallest(self) -> DraftArch:
        """The draft with the least of everything."""
        return DraftArch(**{name: self._largest_first(name)[-1] for name in DIMENSIONS})

    def _largest_first(self, name: str) -> tuple[Any, ...]:
        choices = self.choices(name)
        if name == "tap":
            return tuple(sorted(choices, key=_TAP_ORDER.index))
        if name == "interaction":
            return choices
        return tuple(sorted(choices, reverse=True))

    def tap_layers(self, dims: TargetDims) -> tuple[int, ...]:
        """Target layers that any draft of the space reads, ascending."""
        ids = (DraftArch(tap=tap).sizes(dims).target_layer_ids for tap in self.tap)
        return tuple(sorted(set(itertools.chain.from_iterable(ids))))


def shipped_spaces() -> dict[str, Path]:
    """Search spaces that come with the package, by name."""
    folder = Path(str(resources.files("dreams_nas.search_spaces")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_search_space(name_or_path: str | Path) -> SearchSpace:
    """Load a search space: the name of a shipped one, e.g. "demo", or the path of a YAML file.

    Raises:
        UserError: No such space (the nearest name is suggested), or a wrong key or choice.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        shipped = shipped_spaces()
        if str(name_or_path) not in shipped:
            raise unknown_error("search space", name_or_path, shipped, "the shipped ones")
        path = shipped[str(name_or_path)]
    return load_config(SearchSpace, path)
