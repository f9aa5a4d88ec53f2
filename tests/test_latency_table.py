"""The latency table: interpolation, round trip, hash, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
from fake_tables import DEPLOYMENT, DIMS, IDENTITY, build_table, formula_ms

from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json, write_json
from dreams_nas.latency.blocks import BLOCKS, SPECS, group_key
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.grid import Grid
from dreams_nas.latency.table import LatencyEntry, LatencyTable, Sentinel, load_table, save_table
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import SearchSpace

KEY = group_key("verify", {"mask": "tree"})


def test_grid_is_exact_at_points_and_linear_between() -> None:
    grid = Grid(KEY, [(1, 0, 1.0), (1, 100, 2.0), (5, 0, 3.0), (5, 100, 8.0)])
    assert float(grid(1, 100)) == 2.0
    assert float(grid(3, 0)) == 2.0
    assert float(grid(1, 25)) == 1.25
    assert float(grid(3, 50)) == pytest.approx((1.5 + 5.5) / 2)
    np.testing.assert_allclose(grid(np.array([1, 5]), np.array([0, 100])), [1.0, 8.0])
    np.testing.assert_allclose(grid(3, np.array([0, 50, 100])), [2.0, 3.5, 5.0])
    assert (grid.q_range, grid.kv_range) == ((1, 5), (0, 100))


def test_grid_of_one_point() -> None:
    grid = Grid(KEY, [(4, 7, 2.5)])
    assert float(grid(4, 7)) == 2.5
    with pytest.raises(UserError, match="only 4 to 4 was measured"):
        grid(5, 7)


def test_grid_whose_rows_cover_different_kv() -> None:
    grid = Grid(KEY, [(1, 0, 1.0), (1, 200, 3.0), (8, 0, 4.0), (8, 50, 5.0), (64, 0, 9.0)])
    assert float(grid(1, 100)) == 2.0  # 50 is a knot of another row only: still a straight line
    assert float(grid(64, 0)) == 9.0
    assert float(grid(8, 25)) == 4.5
    with pytest.raises(UserError, match=r"kv = 100 at q = 4, but only 0 to 50 was measured"):
        grid(4, np.array([10, 100]))


@pytest.mark.parametrize(
    ("q", "kv", "message"),
    [
        (66, 64, r"q = 66, but only 1 to 65 was measured.*profile --max-q 66"),
        (4, 2000, r"kv = 2000, but only 0 to 1024 was measured.*profile --max-kv 2000"),
        (4, np.array([3, 1025]), r"kv = 1025, but only 0 to 1024"),
    ],
)
def test_outside_the_measured_range_names_block_value_range_and_command(
    q: int, kv: int, message: str
) -> None:
    grid = build_table().grid("verify", mask="tree")
    with pytest.raises(UserError, match=r"verify\(mask=tree\): " + message):
        grid(q, kv)


def test_below_the_measured_range_is_an_error_too() -> None:
    grid = build_table(kvs=(64, 256)).grid("target_step")
    with pytest.raises(UserError, match=r"target_step: kv = 10, but only 64 to 256 .*profile`"):
        grid(1, 10)


def test_a_prompt_longer_than_the_measured_prefills_asks_for_more_kv() -> None:
    grid = build_table().grid("draft_prefill", num_kv_heads=4, ffn=512, depth=1, taps=3)
    with pytest.raises(UserError, match=r"q = 639, but only 1 to 512 .*profile --max-kv 639"):
        grid(639)


def test_a_block_that_was_not_measured_is_named_with_what_there_is() -> None:
    with pytest.raises(UserError, match=r"draft_fc\(taps=7\); it has draft_fc\(taps=3\)"):
        build_table().grid("draft_fc", taps=7)
    with pytest.raises(UserError, match=r"draft_layer\(ffn=256"):
        CostModel(build_table(), DraftArch(ffn_ratio=0.5), DIMS)


def test_round_trip_keeps_table_and_hash(tmp_path: Path) -> None:
    sentinel = Sentinel(block="target_step", q=1, kv=64, median_ms=(5.1, 5.0), num_remeasured=2)
    table = build_table().replace(sentinel=sentinel, validation={"mape": 0.04})
    save_table(table, tmp_path / "table.json")
    loaded = load_table(tmp_path / "table.json")
    assert loaded == table
    assert loaded.hash == table.hash
    assert read_json(tmp_path / "table.json")["schema"] == "latency-table/2"


def test_hash_covers_header_and_entries_but_not_date_command_and_validation() -> None:
    table = build_table()
    header = table.header
    same = [
        table.replace(header=header.replace(date="2027-01-01", command="other")),
        table.replace(validation={"mape": 0.04}),
        table.replace(entries=tuple(reversed(table.entries))),
    ]
    assert {one.hash for one in same} == {table.hash}
    slower = table.entries[0].replace(p90_ms=99.0)
    others = [
        table.replace(header=header.replace(torch="1.0")),
        table.replace(header=header.replace(shape_hash="other")),
        table.replace(header=header.replace(deployment=DEPLOYMENT.replace(threads=1))),
        table.replace(entries=(slower, *table.entries[1:])),
    ]
    assert len({table.hash, *(one.hash for one in others)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype: float32 against bfloat16"),
        ({"mode": "compiled"}, "mode: eager against compiled"),
        ({"device_name": "Another CPU"}, "device_name: A CPU of formulas against Another CPU"),
        ({"threads": 1}, "threads: 2 against 1"),
    ],
)
def test_a_table_of_another_deployment_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_table().require_match(DEPLOYMENT.replace(**changes), "shape")
    assert "dreams-nas profile" in str(caught.value)


def test_a_table_of_another_target_library_or_core_count_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = build_table()
    table.require_match(DEPLOYMENT, "shape", IDENTITY)
    with pytest.raises(UserError, match="target shape: shape against other"):
        table.require_match(DEPLOYMENT, "other")
    with pytest.raises(UserError, match="num_cores: 2 against 8"):
        table.require_match(DEPLOYMENT, "shape", IDENTITY.replace(num_cores=8))
    old = table.replace(header=table.header.replace(torch="1.0", transformers="2.0"))
    with pytest.raises(UserError, match=r"torch: 1\.0 against .*; transformers: 2\.0 against"):
        old.require_match(DEPLOYMENT, "shape")
    assert capsys.readouterr().err == ""
    old.require_match(DEPLOYMENT, "shape", allow_mismatch=True)
    assert "torch: 1.0 against" in capsys.readouterr().err


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_json(path, {"schema": "latency-table/1", "entries": []})
    with pytest.raises(UserError, match="schema is 'latency-table/1', expected 'latency-table/2'"):
        load_table(path)
    write_json(path, [1, 2])
    with pytest.raises(UserError, match="schema is None"):
        load_table(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": {}}, r"block verify has dims \['mask'\], got \[\]"),
        ({"dims": {"mask": "star"}}, "mask = 'star': should be one of chain, tree"),
        ({"median_ms": 9.0}, "p10 <= median <= p90 is broken"),
        ({"block": "draft_fc", "dims": {"taps": 3}}, "draft_fc does not depend on kv"),
        ({"block": "draft_fc", "dims": {"taps": 0}, "kv": 0}, "taps = 0: should be a positive"),
        ({"block": "verfy"}, "verify"),
        ({"q": 0}, "greater than or equal to 1"),
        ({"median_ms": float("nan")}, "finite"),
    ],
)
def test_wrong_entries_are_refused(changes: dict[str, object], message: str) -> None:
    values = {"block": "verify", "q": 2, "kv": 4, "dims": {"mask": "tree"}, "n": 9}
    values |= {"median_ms": 1.0, "p10_ms": 0.9, "p90_ms": 1.2}
    LatencyEntry.model_validate(values)
    with pytest.raises(ValueError, match=message):
        LatencyEntry.model_validate({**values, **changes})


def test_a_point_measured_twice_is_refused() -> None:
    table = build_table()
    with pytest.raises(ValueError, match=r"target_step is measured twice at q = 1, kv = 0"):
        LatencyTable(header=table.header, entries=(*table.entries, table.entries[0]))


def test_the_fake_table_covers_every_block() -> None:
    table = build_table()
    assert {entry.block for entry in table.entries} == set(BLOCKS) == set(SPECS)


def test_frame_has_a_row_per_entry_and_a_column_per_dimension() -> None:
    table = build_table()
    frame = table.to_frame()
    assert len(frame) == len(table.entries)
    assert {"block", "q", "kv", "median_ms", "mask", "vocab", "part"} <= set(frame.columns)
    rows = frame[(frame["block"] == "verify") & (frame["mask"] == "tree") & (frame["q"] == 33)]
    expected = [formula_ms("verify", 33, kv, {"mask": "tree"}) for kv in rows["kv"]]
    np.testing.assert_allclose(rows["median_ms"], expected)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_cost_model_adds_up_the_blocks(depth: int) -> None:
    space = SearchSpace(
        tap=("last", "three"), depth=(1, 2, 3), head_ratio=(0.5, 1.0), vocab=(0.25,)
    )
    table = build_table(space)
    arch = DraftArch(tap="three", depth=depth, head_ratio=0.5, vocab=0.25)
    costs = CostModel(table, arch, DIMS)

    def layers(q: float, kv: float) -> float:
        dims: dict[str, int | str] = {"num_kv_heads": 2, "ffn": 512}
        first = formula_ms("draft_layer", q, kv, {**dims, "position": "first"})
        return first + (depth - 1) * formula_ms("draft_layer", q, kv, {**dims, "position": "next"})

    def head(kind: str, q: float) -> float:
        return formula_ms("draft_head", q, 0, {"vocab": 1024, "kind": kind})

    sync = formula_ms("draft_sync", 3, 100, {"num_kv_heads": 2, "ffn": 512, "depth": depth})
    sync += formula_ms("draft_fc", 3, 0, {"taps": 3}) + head("sync", 1)
    step = layers(4, 100) + head("step", 4) + formula_ms("draft_fixed", 4, 0, {})
    assert float(costs.t_sync(3, 100)) == pytest.approx(sync)
    assert float(costs.t_step(4, 100)) == pytest.approx(step)
    assert float(costs.t_ar(100)) == pytest.approx(5.2)
    assert float(costs.t_verify(9, 100, "chain")) == pytest.approx(5.2 + 0.8)
    assert float(costs.t_verify(9, 100, "tree")) == pytest.approx(5.2 + 0.96)
    assert float(costs.t_tree(9)) == pytest.approx(0.011 + 0.009)
    assert float(costs.t_commit(9, "chain")) == pytest.approx(0.023 + 0.037 + 0.018)
    assert float(costs.t_commit(9, "tree")) == pytest.approx(0.023 + 0.037 + 0.018 + 0.005)
    prefill = 0.5 + 0.01 * 60 * depth + 0.003
    assert float(costs.t_draft_prefill(60)) == pytest.approx(prefill + head("sync", 1))


def test_measured_rows_limit_policies() -> None:
    table = build_table(qs=(1, 2, 9))
    costs = CostModel(table, DraftArch(), DIMS)
    assert (costs.max_verify_rows("tree"), costs.max_verify_rows("chain")) == (9, 9)
    assert costs.max_step_rows == 9
