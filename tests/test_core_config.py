"""Configs: precedence, errors that name key, value, rule and origin, round trips."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from dreams_nas.core.config import (
    Config,
    build_config,
    config_fields,
    config_hash,
    load_config,
    save_config,
)
from dreams_nas.core.errors import UserError
from dreams_nas.core.yaml_data import parse_yaml, to_yaml


class Chain(Config):
    """A chain."""

    kind: Literal["chain"] = "chain"
    """Kind of policy."""
    levels: int = Field(default=3, ge=0, le=9)
    """Levels drafted, 0 to 9."""


class Static(Config):
    """A tree."""

    kind: Literal["static_tree"] = "static_tree"
    """Kind of policy."""
    nodes: int = 10
    """Nodes."""


class Optimizer(Config):
    """Optimiser settings."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak step size, (0, inf)."""
    steps: int = 100
    """Optimiser steps."""


class Train(Config):
    """A config like those of the verbs."""

    seed: int = 0
    """Root seed of the run."""
    optimizer: Optimizer = Optimizer()
    """Optimiser."""
    policy: Annotated[Chain | Static, Field(discriminator="kind")] = Chain()
    """How much is drafted."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision."""
    depths: tuple[int, ...] = (1, 2)
    """Depths
    to train."""
    data: Path | None = None
    """Conversations."""
    is_fused: bool = True
    """Switch."""

    @model_validator(mode="after")
    def _needs_depths(self) -> "Train":
        if not self.depths:
            raise ValueError("depths must name at least one depth")
        return self


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def message(folder: Path, text: str = "", *settings: str, **flags: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_config(Train, write(folder, text), settings, flags)
    return str(caught.value)


def test_flag_beats_set_beats_yaml_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\noptimizer: {steps: 5, learning_rate: 1e-4}\n")
    assert load_config(Train).seed == 0
    assert load_config(Train, path).seed == 1
    assert load_config(Train, path, ["seed=2"]).seed == 2
    assert load_config(Train, path, ["seed=2"], {"seed": 3, "dtype": None}).seed == 3
    config = load_config(Train, path, ["optimizer.steps=6", "depths=[3]", "is_fused=false"])
    assert config.optimizer == Optimizer(steps=6, learning_rate=1e-4)
    assert config.depths == (3,)
    assert config.is_fused is False


def test_configs_are_frozen_and_keyword_only() -> None:
    config = Train()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Train(1)  # type: ignore[call-arg]
    assert config.replace(seed=4).seed == 4
    with pytest.raises(ValidationError):
        config.replace(seed="four")


def test_unknown_key_names_file_key_guess_and_choices(tmp_path: Path) -> None:
    text = message(tmp_path, "sede: 1\n")
    assert "run.yaml: unknown key 'sede' (did you mean 'seed'?); choices: seed, optimizer" in text


def test_unknown_nested_key_is_looked_up_where_it_stands(tmp_path: Path) -> None:
    text = message(tmp_path, "optimizer: {learning_rat: 1}\n")
    assert "unknown key 'learning_rat' in optimizer (did you mean 'learning_rate'?)" in text
    text = message(tmp_path, "policy: {kind: static_tree, node: 3}\n")
    assert "unknown key 'node' in policy (did you mean 'nodes'?)" in text


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("seed: many\n", "run.yaml: seed = many: input should be a valid integer"),
        ("seed: true\n", "run.yaml: seed = true: input should be a valid integer"),
        ("optimizer: {learning_rate: 0}\n", "optimizer.learning_rate = 0: input should be greater"),
        (
            "optimizer: {learning_rate: .nan}\n",
            "optimizer.learning_rate = nan: input should be a",
        ),
        ("policy: {kind: chain, levels: 12}\n", "policy.levels = 12: input should be less than or"),
        ("depths: [1, x]\n", "depths.1 = x: input should be a valid integer"),
        ("depths: []\n", "run.yaml: depths must name at least one depth"),
        ("dtype: bfloat61\n", "'float32' or 'bfloat16' (did you mean 'bfloat16'?)"),
        ("- 1\n", "run.yaml: should hold 'key: value' lines, not [1]"),
        ("seed: [1\n", "run.yaml: is not valid YAML"),
        ("seed: 1\nseed: 2\n", "the key 'seed' is given twice"),
        ("seed: !!python/object/apply:os.getcwd []\n", "run.yaml: is not valid YAML"),
    ],
)
def test_a_wrong_value_names_key_value_rule_and_file(
    tmp_path: Path, yaml: str, expected: str
) -> None:
    assert expected in message(tmp_path, yaml)


def test_every_wrong_key_is_reported_at_once_with_its_own_origin(tmp_path: Path) -> None:
    lines = message(tmp_path, "seed: x\n", "optimizer.steps=y", dtype="z").splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(str(tmp_path / "run.yaml: seed = x"))
    assert lines[1].startswith("--set optimizer.steps=y: optimizer.steps = y")
    assert lines[2].startswith("--dtype: dtype = z")


def test_a_file_of_wrong_values_is_no_wall_of_text(tmp_path: Path) -> None:
    depths = ", ".join("x" for _ in range(500))
    lines = message(tmp_path, f"depths: [{depths}]\n").splitlines()
    assert len(lines) == 21
    assert lines[-1].endswith("run.yaml: and 480 more")


def test_a_broken_override_is_explained() -> None:
    with pytest.raises(UserError, match=r"--set seed: should read key=value"):
        load_config(Train, None, ["seed"])


def test_a_required_key_is_named() -> None:
    class Needy(Config):
        """Needs."""

        target: str
        """Target."""

    with pytest.raises(UserError, match=r"table\.json: the key 'target' is required"):
        build_config(Needy, {}, "table.json")
    assert config_fields(Needy)[0].default == "required"


@pytest.mark.parametrize("name", ["missing.yaml", "folder"])
def test_an_unreadable_file_is_a_user_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=name):
        load_config(Train, tmp_path / name)


def test_a_saved_config_reloads_to_the_same_config(tmp_path: Path) -> None:
    config = load_config(
        Train,
        None,
        ["policy={kind: static_tree, nodes: 4}", "data='1e-4'", "optimizer.learning_rate=1e-05"],
    )
    assert config.policy == Static(nodes=4)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(Train, tmp_path / "config.yaml") == config
    assert config_hash(load_config(Train, tmp_path / "config.yaml")) == config_hash(config)


def test_the_hash_follows_values_and_leaves_out_what_is_excluded() -> None:
    assert config_hash(Train(seed=1)) != config_hash(Train())
    assert config_hash(Train(seed=1), exclude={"seed"}) == config_hash(Train(), exclude={"seed"})


def test_field_docstrings_become_documentation() -> None:
    fields = {field.key: field for field in config_fields(Train)}
    assert fields["optimizer.learning_rate"] == (
        "optimizer.learning_rate",
        "0.001",
        "Peak step size, (0, inf).",
    )
    assert fields["depths"].description == "Depths to train."
    assert fields["data"].default == "null"
    assert all(field.description for field in fields.values())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2", -2),
        ("0.50", 0.5),
        ("off", "off"),
        ("yes", "yes"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("true", True),
        ("null", None),
        ("", None),
        ("'1'", "1"),
    ],
)
def test_yaml_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["1e-4", "true", "null", "~", "", "1", "a: b", "- x", "0x1", "no"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert parse_yaml(to_yaml({"key": text}), "here") == {"key": text}


def test_a_nested_config_given_in_part_keeps_the_rest_of_its_own_default() -> None:
    class Leaf(Config):
        """A recipe."""

        seconds: float | None = None
        """Budget."""
        rate: float = 1.0
        """Rate."""

    class Branch(Config):
        """A phase."""

        leaf: Leaf = Leaf(seconds=60)
        """Recipe."""

    class Root(Config):
        """A run."""

        branch: Branch = Branch(leaf=Leaf(seconds=90))
        """Phase."""

    assert load_config(Root, None, ["branch.leaf.rate=2"]).branch.leaf == Leaf(seconds=90, rate=2)
    assert load_config(Branch, None, ["leaf.rate=2"]).leaf == Leaf(seconds=60, rate=2)
    assert load_config(Root, None, ["branch.leaf.seconds=null"]).branch.leaf.seconds is None
    shown = {field.key: field.default for field in config_fields(Root)}
    assert shown["branch.leaf.seconds"] == "90.0"
