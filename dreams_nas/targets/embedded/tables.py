"""Real tables behind the charts: loading, the split by table, windows of a column.

``tables/SOURCES.csv`` names every table with its origin, licence and split. A window is a few
consecutive rows of one numeric column, rescaled to the grid of a chart.
"""

import csv
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dreams_nas.core.errors import UserError, unknown_message

TABLES = Path(__file__).parent / "tables"
SPLITS = ("train", "choose", "score", "test")
NUM_LEVELS = 21
MIN_GAP = 2
"""Fewest levels between two marks of a chart, so that an order can be told at a glance."""

_LABEL = re.compile(r"[A-Z][a-z]+(?: [A-Za-z][a-z]+)?")


@dataclass(frozen=True, kw_only=True)
class Table:
    """One committed table."""

    name: str
    labels: tuple[str, ...]
    """Row labels, as in the file (years, months, states...)."""
    columns: dict[str, tuple[float, ...]]
    """Numeric columns by name; every column is as long as ``labels``."""


@cache
def sources() -> tuple[dict[str, str], ...]:
    """Return the rows of ``SOURCES.csv``: table, split, package, dataset, licence, derived."""
    with (TABLES / "SOURCES.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@cache
def load_table(name: str) -> Table:
    """Read one table of ``tables/`` by name."""
    with (TABLES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    columns = {
        column: tuple(float(row[i]) for row in rows) for i, column in enumerate(header) if i > 0
    }
    return Table(name=name, labels=tuple(row[0] for row in rows), columns=columns)


def table_names(split: str) -> tuple[str, ...]:
    """Return the names of the tables of a split, sorted.

    Raises:
        UserError: if ``split`` is none of ``SPLITS``.
    """
    if split not in SPLITS:
        raise UserError(unknown_message("split of the embedded data", split, SPLITS))
    return tuple(sorted(row["table"] for row in sources() if row["split"] == split))


@cache
def label_pool(split: str) -> tuple[str, ...]:
    """Return the row labels of a split that read as names: one or two plain words."""
    labels = {label for name in table_names(split) for label in load_table(name).labels}
    return tuple(sorted(x for x in labels if _LABEL.fullmatch(x) and 3 <= len(x) <= 16))


def to_levels(values: tuple[float, ...], low: int, high: int) -> tuple[int, ...]:
    """Rescale numbers to the grid levels ``low..high``, keeping their order.

    Marks closer than ``MIN_GAP`` levels are moved apart in their order; equal values count as
    ordered from left to right.
    """
    span = max(values) - min(values)
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    exact = [
        low + (high - low) * ((values[i] - min(values)) / span if span else 0.0) for i in order
    ]
    levels: list[int] = []
    for rank, value in enumerate(exact):
        room = high - MIN_GAP * (len(order) - 1 - rank)
        floor = levels[-1] + MIN_GAP if levels else low
        levels.append(max(floor, min(room, round(value))))
    placed = [0] * len(order)
    for rank, i in enumerate(order):
        placed[i] = levels[rank]
    return tuple(placed)


def sample_window(split: str, num_marks: int, rng: random.Random) -> tuple[str, tuple[int, ...]]:
    """Draw a window of a table of the split, as levels of the grid.

    Args:
        split: one of ``SPLITS``.
        num_marks: marks of the chart; tables with fewer rows are passed over.
        rng: the chart's own generator.

    Returns:
        The table's name and one level (0..20) per mark.
    """
    names = [n for n in table_names(split) if len(load_table(n).labels) >= num_marks]
    table = load_table(rng.choice(names))
    column = table.columns[rng.choice(sorted(table.columns))]
    start = rng.randrange(len(column) - num_marks + 1)
    low = rng.randint(1, 4)
    high = rng.randint(max(low + MIN_GAP * (num_marks - 1), 13), NUM_LEVELS - 1)
    return table.name, to_levels(column[start : start + num_marks], low, high)
