"""Tables, charts and pictures of the embedded target."""

import csv
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from PIL import Image

from dreams_nas.core.errors import UserError
from dreams_nas.targets.embedded.charts import (
    COLOURS,
    KINDS,
    Chart,
    build_chart,
    draw_chart,
    slot_edges,
)
from dreams_nas.targets.embedded.names import WORDS, sample_names
from dreams_nas.targets.embedded.tables import (
    MIN_GAP,
    NUM_LEVELS,
    SPLITS,
    TABLES,
    label_pool,
    load_table,
    sample_window,
    sources,
    table_names,
    to_levels,
)

FREE = ("public domain", "CC0-1.0", "CC-BY-2.0", "CC-BY-3.0-IGO", "BSD-3-Clause")


def test_every_table_has_its_source_and_the_other_way_round() -> None:
    files = {path.stem for path in TABLES.glob("*.csv")} - {"SOURCES"}
    assert files == {row["table"] for row in sources()}
    assert len(files) >= 60


def test_tables_are_small_and_free() -> None:
    assert sum(path.stat().st_size for path in TABLES.iterdir()) < 300_000
    for row in sources():
        assert row["licence"].startswith(FREE), row
        assert row["package"]
        assert row["dataset"]


def test_every_table_is_numbers_with_labels() -> None:
    for row in sources():
        table = load_table(row["table"])
        assert len(table.labels) == int(row["rows"]) >= 3
        assert len(table.columns) == int(row["columns"]) >= 1
        assert all(len(set(column)) > 1 for column in table.columns.values())
        with (TABLES / f"{row['table']}.csv").open(newline="", encoding="utf-8") as file:
            assert len({len(line) for line in csv.reader(file)}) == 1


def test_splits_share_no_table() -> None:
    names = [name for split in SPLITS for name in table_names(split)]
    assert len(names) == len(set(names)) == len(sources())
    assert all(len(table_names(split)) >= 6 for split in SPLITS)


def test_an_unknown_split_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"'tset'.*did you mean 'test'"):
        table_names("tset")


@pytest.mark.parametrize("num_marks", [3, 4, 5, 6])
def test_levels_keep_the_order_and_stand_apart(num_marks: int) -> None:
    rng = Random(num_marks)
    for _ in range(200):
        values = tuple(rng.choice((rng.gauss(0, 1), 0.5)) for _ in range(num_marks))
        levels = to_levels(values, 1, 20)
        assert min(levels) >= 1
        assert max(levels) <= 20
        assert all(high - low >= MIN_GAP for low, high in pairwise(sorted(levels)))
        for i in range(num_marks):
            for j in range(num_marks):
                assert values[i] >= values[j] or levels[i] < levels[j]


def test_levels_are_proportional_where_there_is_room() -> None:
    assert to_levels((0.0, 50.0, 100.0), 0, 20) == (0, 10, 20)
    assert to_levels((7.0, 7.0, 7.0), 2, 20) == (2, 4, 6)


def _order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (values[i], i))


def test_a_window_comes_from_its_table() -> None:
    name, levels = sample_window("test", 4, Random(3))
    columns = load_table(name).columns.values()
    windows = [c[i : i + 4] for c in columns for i in range(len(c) - 3)]
    orders = [_order(window) for window in windows]
    assert name in table_names("test")
    assert _order(levels) in orders


def test_names_are_distinct_and_none_contains_another() -> None:
    for seed in range(300):
        names = sample_names("train", 6, Random(seed))
        assert not any(a in b for a in names for b in names if a is not b)


def test_names_are_words_and_row_labels_and_inventions_only_where_asked_for() -> None:
    known = {*WORDS, *label_pool("score")}
    names = {n for seed in range(300) for n in sample_names("score", 5, Random(seed))}
    assert names <= known
    assert names & set(WORDS)
    assert names & set(label_pool("score"))
    mixed = [n for seed in range(100) for n in sample_names("score", 5, Random(seed), True)]
    invented = [name for name in mixed if name not in known]
    assert len(set(invented)) > 200
    assert all(re.fullmatch("[A-Z][a-z]+", name) for name in invented)


def test_a_chart_depends_on_split_number_and_seed_alone() -> None:
    chart = build_chart("choose", 5, 1)
    assert chart == build_chart("choose", 5, 1)
    others = [build_chart("choose", 6, 1), build_chart("choose", 5, 2), build_chart("test", 5, 1)]
    assert chart not in others
    assert chart.table in table_names("choose")


def test_charts_show_three_to_six_marks_of_every_kind() -> None:
    charts = [build_chart("train", i) for i in range(300)]
    assert {len(chart.names) for chart in charts} == {3, 4, 5, 6}
    assert {chart.kind for chart in charts} == set(KINDS)
    assert {colour for chart in charts for colour in chart.colours} == set(COLOURS)
    for chart in charts:
        assert len(chart.names) == len(chart.colours) == len(chart.values)
        assert all(0 <= value < NUM_LEVELS for value in chart.values)


def _read_values(chart: Chart) -> list[int]:
    """Read the levels back from the picture: the far edge, or the centre, of each mark."""
    image = draw_chart(chart)
    if chart.kind == "rows":  # turned so that marks stand side by side and level 0 is below
        image = image.transpose(Image.Transpose.ROTATE_90)
    values = []
    for (start, end), colour in zip(slot_edges(len(chart.values)), chart.colours, strict=True):
        inside = [
            (x, y)
            for x in range(round(start), round(end))
            for y in range(96)
            if image.getpixel((x, y)) == COLOURS[colour]
        ]
        top, bottom = min(y for _, y in inside), max(y for _, y in inside)
        at = (top + bottom) / 2 if chart.kind in ("dots", "line") else top
        values.append(round((89 - at) / 4))
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_the_picture_shows_colours_and_values(kind: str) -> None:
    charts = [c for c in (build_chart("train", i) for i in range(60)) if c.kind == kind]
    assert len(charts) >= 5
    for chart in charts[:8]:
        assert draw_chart(chart).size == (96, 96)
        assert _read_values(chart) == list(chart.values)


def test_the_generator_needs_no_torch() -> None:
    code = (
        "import sys, dreams_nas.targets.embedded as e, dreams_nas.targets.embedded.generator;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules;"
        "print(e.EMBEDDED, e.embedded_target_path().name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["embedded", "weights"]
