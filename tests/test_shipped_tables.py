"""Every shipped latency table loads, is validated, and prices the space it was measured for."""

from pathlib import Path

import pytest

from dreams_nas.core.files import read_json
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.table import load_table
from dreams_nas.space.arch import TargetDims
from dreams_nas.space.search_space import load_search_space
from dreams_nas.targets.embedded import embedded_target_path

TABLES = sorted((Path(__file__).parent.parent / "latency_tables").rglob("*.json"))


def test_there_are_tables() -> None:
    assert TABLES


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_table_prices_every_draft_of_the_demo(path: Path) -> None:
    table = load_table(path)
    assert table.validation is not None
    text = read_json(embedded_target_path() / "config.json")["text_config"]
    dims = TargetDims(
        hidden=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_size=text["head_dim"],
        ffn=text["intermediate_size"],
        vocab=text["vocab_size"],
    )
    archs = load_search_space("demo").enumerate(dims)
    plain_ms = CostModel(table, archs[0], dims).t_ar(128)
    for arch in archs:
        costs = CostModel(table, arch, dims)
        assert 0 < costs.t_step(1, 128) < plain_ms
        assert costs.t_verify(33, 128, "tree") > plain_ms
