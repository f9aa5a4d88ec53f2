"""The search space: choices, canonical names, encoding, and the shipped YAML files."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from fake_tables import DIMS

from dreams_nas.core.errors import UserError
from dreams_nas.core.yaml_data import read_yaml
from dreams_nas.space.arch import NAMED_ARCHS, DraftArch
from dreams_nas.space.search_space import (
    DIMENSIONS,
    PolicySpace,
    SearchSpace,
    load_search_space,
    shipped_spaces,
)
from dreams_nas.space.servable import serving_engines
from dreams_nas.space.tree import StaticTree

SPACE = SearchSpace(tap=("last", "three"), depth=(2, 1), head_ratio=(1.0, 0.5), vocab=(0.5, 1.0))


def test_the_package_ships_spaces() -> None:
    assert {"demo", "fuse", "servable-sglang", "servable-vllm"} <= set(shipped_spaces())


@pytest.mark.parametrize("name", sorted(shipped_spaces()))
def test_every_shipped_space_loads_and_fits_the_embedded_target(name: str) -> None:
    space = load_search_space(name)
    space.validate_for(DIMS)
    archs = space.enumerate(DIMS)
    assert 0 < len(archs) <= space.size
    assert space.largest() in archs
    assert space.smallest() in archs
    assert load_search_space(shipped_spaces()[name]) == space
    if name.startswith("servable"):
        engine = name.removeprefix("servable-")
        tree = StaticTree.chain(2)
        assert all(engine in serving_engines(arch, DIMS, tree) for arch in archs)


def test_demo_space_varies_what_it_says() -> None:
    space = load_search_space("demo")
    assert space.tap == ("last", "three")
    assert space.vocab == (0.125, 0.25, 0.5, 1.0)
    assert space.policy == PolicySpace(kind="static_tree", levels=(0, 8), nodes=(1, 32))
    assert space.size == 2**5 * 4
    assert space.contains(NAMED_ARCHS["eagle3"])
    assert len({arch.body_key for arch in space.enumerate(DIMS)}) == 32


def test_drafts_that_differ_in_vocabulary_alone_are_neighbours() -> None:
    bodies = [arch.body_key for arch in load_search_space("demo").enumerate(DIMS)]
    changes = sum(a != b for a, b in itertools.pairwise(bodies))
    assert changes == len(set(bodies)) - 1


def test_enumeration_is_unique_and_does_not_depend_on_the_order_in_the_file() -> None:
    archs = SPACE.enumerate()
    assert len(archs) == len({arch.key for arch in archs}) == SPACE.size == 16
    other = SearchSpace(
        tap=("last", "three"), depth=(1, 2), head_ratio=(0.5, 1.0), vocab=(1.0, 0.5)
    )
    assert other.enumerate() == archs
    assert other.hash == SPACE.hash
    assert other.replace(depth=(1,)).hash != SPACE.hash


def test_a_tap_may_be_written_as_a_number(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("tap: [0.25, 0.5, last]\n")
    assert load_search_space(path).tap == ("0.25", "0.5", "last")


def test_equal_drafts_get_one_name() -> None:
    dims = DIMS.replace(num_layers=2, num_kv_heads=1, num_heads=2)
    space = SearchSpace(tap=("0.75", "last", "0.25"), head_ratio=(0.5, 1.0), ffn_ratio=(0.5, 1.0))
    # Of two layers, 0.75 and last are both layer 1; of one group every ratio keeps one.
    archs = space.enumerate(dims)
    assert {arch.tap for arch in archs} == {"last", "0.25"}
    assert {arch.head_ratio for arch in archs} == {1.0}
    assert len(archs) == 4
    assert len({arch.sizes(dims) for arch in archs}) == 4
    arch = DraftArch(tap="0.75", head_ratio=0.5, ffn_ratio=0.5)
    assert space.canonical(arch, dims) == DraftArch(tap="last", head_ratio=1.0, ffn_ratio=0.5)
    assert space.canonical(arch, DIMS) == arch


def test_encode_decode_round_trip_for_every_draft() -> None:
    genomes = [SPACE.encode(arch) for arch in SPACE.enumerate()]
    assert len(set(genomes)) == SPACE.size
    assert [SPACE.decode(genome) for genome in genomes] == SPACE.enumerate()
    with pytest.raises(UserError, match=r"gene 2 of depth is outside 0\.\.1"):
        SPACE.decode((0, 0, 2, 0, 0, 0, 0))
    with pytest.raises(UserError, match="7 genes, got 2"):
        SPACE.decode((0, 0))


def test_samples_come_from_the_space_and_depend_on_the_seed() -> None:
    rng = np.random.default_rng(0)
    samples = [SPACE.sample(rng) for _ in range(200)]
    assert set(samples) == set(SPACE.enumerate())
    again = np.random.default_rng(0)
    assert [SPACE.sample(again) for _ in range(200)] == samples
    other = np.random.default_rng(1)
    assert [SPACE.sample(other) for _ in range(200)] != samples


def test_largest_and_smallest() -> None:
    assert SPACE.largest() == DraftArch(tap="three", depth=2)
    assert SPACE.smallest() == DraftArch(tap="last", depth=1, head_ratio=0.5, vocab=0.5)


def test_tap_layers_are_the_union() -> None:
    assert SPACE.tap_layers(DIMS) == (1, 3, 5, 7)
    assert SearchSpace(tap=("last",)).tap_layers(DIMS) == (7,)


def test_a_draft_from_outside_is_refused_by_field_value_and_choices() -> None:
    arch = DraftArch(tap="last", keep_ratio=0.3)
    assert not SPACE.contains(arch)
    with pytest.raises(UserError, match=r"keep_ratio = 0.3 .* not in the search space; .* 1.0"):
        SPACE.require(arch)
    SPACE.require(DraftArch(tap="last"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depht: [1]", "did you mean 'depth'"),
        ("depth: [0]", "greater than or equal to 1"),
        ("depth: []", "at least one choice"),
        ("vocab: [0.5, 0.5]", "names a choice twice"),
        ("tap: [lst]", "tap.0 = lst"),
        ("head_ratio: [1.5]", "less than or equal to 1"),
        ("policy: {levels: [4, 2]}", "least <= most"),
        ("policy: {levels: [9, 9], nodes: [1, 5]}", "need a node each"),
        ("policy: {kind: chain, levels: [0, 3], nodes: [5, 9]}", "no size in common"),
        ("policy: {kind: dynamic}", "static_tree"),
    ],
)
def test_wrong_files_name_key_value_and_rule(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text + "\n")
    with pytest.raises(UserError, match=message) as caught:
        load_search_space(path)
    assert str(path) in str(caught.value)


def test_an_unknown_space_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown search space 'dmeo'.*did you mean 'demo'"):
        load_search_space("dmeo")
    with pytest.raises(UserError, match="no such file"):
        load_search_space("missing.yaml")


def test_a_choice_that_the_target_cannot_realise_is_refused() -> None:
    with pytest.raises(UserError, match=r"tap = three: .* layers \[0, 0, 1\]"):
        SPACE.validate_for(DIMS.replace(num_layers=2))
    with pytest.raises(UserError, match=r"head_ratio .* 8 query heads .* 3 groups"):
        SPACE.validate_for(DIMS.replace(num_kv_heads=3))


def test_where_a_draft_can_be_served() -> None:
    tree = StaticTree.from_paths([(0,), (1,)])
    arch = DraftArch()
    assert serving_engines(arch, DIMS) == ("own", "vllm", "sglang")
    assert serving_engines(arch, DIMS, tree) == ("own", "sglang")
    assert serving_engines(arch.replace(keep_ratio=0.5), DIMS) == ("own",)
    assert serving_engines(arch.replace(tap="last"), DIMS) == ("own",)
    # 6 query heads of 8 divide 192 but 10 of 16 do not divide 128.
    assert "vllm" in serving_engines(arch.replace(head_ratio=0.75), DIMS)
    wide = DIMS.replace(hidden=128, num_heads=16, num_kv_heads=8)
    assert serving_engines(arch.replace(head_ratio=0.625), wide) == ("own",)


def test_shipped_yaml_holds_only_fields_of_the_space() -> None:
    for path in shipped_spaces().values():
        assert set(read_yaml(path)) <= {*DIMENSIONS, "policy"}
