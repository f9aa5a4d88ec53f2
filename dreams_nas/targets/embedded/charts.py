"""A chart: what it shows, and its picture of 96 x 96 pixels drawn without any font."""

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from dreams_nas.targets.embedded.names import sample_names
from dreams_nas.targets.embedded.tables import NUM_LEVELS, sample_window

IMAGE_SIZE = 96
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "orange": (255, 140, 20),
    "yellow": (236, 214, 20),
    "green": (44, 150, 50),
    "blue": (35, 85, 210),
    "purple": (135, 55, 185),
    "pink": (252, 135, 195),
    "black": (35, 35, 35),
}
COLOUR_NAMES = tuple(COLOURS)
KINDS = ("bars", "rows", "dots", "line")
_KIND_WEIGHTS = (0.45, 0.2, 0.2, 0.15)
_STEP = 4
"""Pixels per grid level."""
_ZERO = 90
"""Pixel row of level 0 in upright charts; in lying ones level 0 is at ``IMAGE_SIZE - _ZERO``."""
_GRID = (222, 222, 222)
_AXIS = (110, 110, 110)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: marks in reading order (left to right, or top to bottom)."""

    table: str
    """Name of the table the values come from."""
    kind: str
    """``bars`` (upright), ``rows`` (lying bars), ``dots`` or ``line`` (joined points)."""
    names: tuple[str, ...]
    colours: tuple[str, ...]
    values: tuple[int, ...]
    """Grid levels, 0..20, at least two apart."""
    thickness: float
    """Width of a mark as a share of its slot."""


def build_chart(split: str, index: int, seed: int = 0, with_inventions: bool = False) -> Chart:
    """Build chart number ``index`` of a split; the same arguments give the same chart.

    Args:
        split: ``train``, ``choose``, ``score`` or ``test``; decides the tables.
        index: number of the chart, 0 or more.
        seed: root seed.
        with_inventions: see ``sample_names``.

    Raises:
        UserError: if the split is unknown.
    """
    rng = random.Random(f"chart/{seed}/{split}/{index}")
    num_marks = rng.choice((3, 4, 5, 5, 6, 6))
    table, values = sample_window(split, num_marks, rng)
    distinct = rng.random() < 0.6
    colours = (
        rng.sample(COLOUR_NAMES, num_marks) if distinct else rng.choices(COLOUR_NAMES, k=num_marks)
    )
    return Chart(
        table=table,
        kind=rng.choices(KINDS, _KIND_WEIGHTS)[0],
        names=sample_names(split, num_marks, rng, with_inventions),
        colours=tuple(colours),
        values=values,
        thickness=rng.uniform(0.5, 0.8),
    )


def slot_edges(num_marks: int) -> list[tuple[float, float]]:
    """Return where each mark's slot begins and ends along the category axis, in pixels."""
    first, width = 7.0, (IMAGE_SIZE - 9.0) / num_marks
    return [(first + i * width, first + (i + 1) * width) for i in range(num_marks)]


def draw_chart(chart: Chart) -> Image.Image:
    """Draw a chart as an RGB picture; grid lines stand at every fifth level."""
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    draw = ImageDraw.Draw(image)
    lying = chart.kind == "rows"
    for level in range(0, NUM_LEVELS, 5):
        at = _pixel(level, lying)
        _line(draw, at, 4, IMAGE_SIZE - 1, _GRID if level else _AXIS, lying)
    _line(draw, 5, IMAGE_SIZE - 1 - _ZERO if lying else 4, _ZERO, _AXIS, not lying)
    centres = []
    for (start, end), value, colour in zip(
        slot_edges(len(chart.values)), chart.values, chart.colours, strict=True
    ):
        middle = (start + end) / 2
        centres.append((middle, float(_pixel(value, lying))))
        half = chart.thickness * (end - start) / 2
        if chart.kind == "bars":
            upright = (middle - half, _pixel(value, False), middle + half, _ZERO - 1)
            draw.rectangle(upright, fill=COLOURS[colour])
        elif lying:
            box = (_pixel(0, True) + 1, middle - half, _pixel(value, True), middle + half)
            draw.rectangle(box, fill=COLOURS[colour])
    if chart.kind == "line":
        draw.line(centres, fill=_AXIS, width=1)
    if chart.kind in ("line", "dots"):
        for (x, y), colour in zip(centres, chart.colours, strict=True):
            draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=COLOURS[colour])
    return image


def _pixel(level: int, lying: bool) -> int:
    """Return the pixel of a level along the value axis."""
    return IMAGE_SIZE - _ZERO + _STEP * level if lying else _ZERO - 1 - _STEP * level


def _line(
    draw: ImageDraw.ImageDraw, at: int, start: int, end: int, fill: tuple[int, ...], upright: bool
) -> None:
    """Draw a line across the picture, upright or level."""
    draw.line((at, start, at, end) if upright else (start, at, end, at), fill=fill, width=1)
