"""Questions about a chart and their answers: one answer per wording, nothing drawn in the answer.

Every answer is plain sentences; ``Answer.facts`` lists the names, colours and values in the order
in which they are said, which is what ``scoring`` compares.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dreams_nas.targets.embedded.charts import Chart

COUNT_WORDS = ("no", "one", "two", "three", "four", "five", "six")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
CHART_WORDS = {
    "bars": "bar chart",
    "rows": "horizontal bar chart",
    "dots": "dot plot",
    "line": "line chart",
}
MARK_WORDS = {"bars": "bar", "rows": "bar", "dots": "dot", "line": "point"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, its answer and the facts said in it."""

    question: str
    text: str
    names: tuple[str, ...]
    colours: tuple[str, ...]
    values: tuple[int, ...]
    """Values read from the chart and their differences or sums, in order."""
    spans: tuple[tuple[int, int, int], ...]
    """(start, end, mark): the characters of ``text`` that say something about one mark."""
    asked: tuple[tuple[int, int, int], ...]
    """The same for ``question``: the names in it."""


class _Teller:
    """Collects the facts while sentences are written."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.names: list[str] = []
        self.colours: list[str] = []
        self.values: list[int] = []

    def asked(self, i: int) -> str:
        return _about(i, self.chart.names[i])

    def name(self, i: int) -> str:
        self.names.append(self.chart.names[i])
        return _about(i, self.chart.names[i])

    def colour(self, i: int) -> str:
        self.colours.append(self.chart.colours[i])
        return _about(i, self.chart.colours[i])

    def value(self, i: int) -> str:
        return _about(i, self.number(self.chart.values[i]))

    def number(self, value: int) -> str:
        self.values.append(value)
        return str(value)

    def plural(self) -> str:
        return f"{COUNT_WORDS[len(self.chart.names)]} {MARK_WORDS[self.chart.kind]}s"

    def ranked(self) -> list[int]:
        return sorted(range(len(self.chart.values)), key=lambda i: -self.chart.values[i])


def _about(mark: int, words: str) -> str:
    """Fence words about a mark in, until ``_spans`` takes the fences out."""
    return f"\0{mark}{words}\1"


def _spans(fenced: str) -> tuple[str, tuple[tuple[int, int, int], ...]]:
    """Return the text without fences, and (start, end, mark) of what was fenced."""
    first, *parts = fenced.split("\0")
    text, spans = first, []
    for part in parts:
        words, after = part[1:].split("\1")
        spans.append((len(text), len(text) + len(words), int(part[0])))
        text += words + after
    return text, tuple(spans)


def join(parts: Sequence[str]) -> str:
    """Join parts as in prose: ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


Maker = Callable[[_Teller, random.Random], tuple[str, str]]


def _describe(t: _Teller, rng: random.Random) -> tuple[str, str]:
    marks = range(len(t.chart.names))
    style = rng.randrange(3)
    if style == 0:
        text = f"This is a {CHART_WORDS[t.chart.kind]} with {t.plural()}."
        for i in marks:
            text += f" {t.name(i)} is {t.colour(i)} and reaches {t.value(i)}."
        order = t.ranked()
        text += f" The highest is {t.name(order[0])} and the lowest is {t.name(order[-1])}."
        return "Describe the chart.", text
    if style == 1:
        text = f"The {CHART_WORDS[t.chart.kind]} shows {t.plural()}."
        for i in marks:
            start = "The first is" if i == 0 else "The last is" if i == marks[-1] else "Then comes"
            text += f" {start} {t.name(i)}, drawn in {t.colour(i)} with a value of {t.value(i)}."
        return "What does the chart show?", text
    parts = [f"{t.name(i)} in {t.colour(i)} at {t.value(i)}" for i in marks]
    order = t.ranked()
    text = f"There are {t.plural()} in this {CHART_WORDS[t.chart.kind]}: {join(parts)}."
    text += f" The values go from {t.value(order[-1])} to {t.value(order[0])}."
    return "Tell me about every mark.", text


def _extremes(t: _Teller, rng: random.Random) -> tuple[str, str]:
    order = t.ranked()
    top, low = order[0], order[-1]
    if rng.random() < 0.5:
        mark = MARK_WORDS[t.chart.kind]
        text = (
            f"The highest {mark} is {t.name(top)}, which is {t.colour(top)} and has a value of "
            f"{t.value(top)}. The lowest {mark} is {t.name(low)}, which is {t.colour(low)} and has "
            f"a value of {t.value(low)}. The difference between them is "
            f"{t.number(_gap(t, top, low))}."
        )
        return "Which mark is the highest and which is the lowest?", text
    text = (
        f"The values run from {t.value(low)} for {t.name(low)}, which is {t.colour(low)}, up to "
        f"{t.value(top)} for {t.name(top)}, which is {t.colour(top)}. So the range is "
        f"{t.number(_gap(t, top, low))}."
    )
    return "What is the range of the values?", text


def _gap(t: _Teller, high: int, low: int) -> int:
    return t.chart.values[high] - t.chart.values[low]


def _compare(t: _Teller, rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(len(t.chart.names)), 2)
    high, low = (a, b) if t.chart.values[a] > t.chart.values[b] else (b, a)
    if rng.random() < 0.5:
        text = (
            f"{t.name(a)} is {t.colour(a)} and has a value of {t.value(a)}, while {t.name(b)} is "
            f"{t.colour(b)} and has a value of {t.value(b)}. So {t.name(high)} is higher than "
            f"{t.name(low)}, and the difference is {t.number(_gap(t, high, low))}."
        )
        return f"Compare {t.asked(a)} with {t.asked(b)}.", text
    text = (
        f"{t.name(high)} is higher. It is {t.colour(high)} and reaches {t.value(high)}, whereas "
        f"{t.name(low)} is {t.colour(low)} and reaches only {t.value(low)}, which makes a "
        f"difference of {t.number(_gap(t, high, low))}."
    )
    return f"Which one is higher, {t.asked(a)} or {t.asked(b)}?", text


def _sort(t: _Teller, rng: random.Random) -> tuple[str, str]:
    down = rng.random() < 0.5
    order = t.ranked() if down else t.ranked()[::-1]
    ends = ("highest", "lowest") if down else ("lowest", "highest")
    parts = [f"{t.name(i)} with {t.value(i)}" for i in order]
    text = (
        f"From {ends[0]} to {ends[1]}, the {MARK_WORDS[t.chart.kind]}s are {join(parts)}. The "
        f"{ends[0]} one is {t.colour(order[0])} and the {ends[1]} one is {t.colour(order[-1])}."
    )
    return f"Sort the marks from {ends[0]} to {ends[1]}.", text


def _colours(t: _Teller, rng: random.Random) -> tuple[str, str]:
    parts = [f"{t.name(i)} is {t.colour(i)}" for i in range(len(t.chart.names))]
    num = len(set(t.chart.colours))
    ending = f"{COUNT_WORDS[num]} {'colour' if num == 1 else 'different colours'}"
    text = f"Going through the {MARK_WORDS[t.chart.kind]}s in order, {join(parts)}. "
    return "What colours are the marks?", f"{text}That makes {ending} in all."


def _values(t: _Teller, rng: random.Random) -> tuple[str, str]:
    parts = [f"{t.value(i)} for {t.name(i)}" for i in range(len(t.chart.names))]
    top = t.ranked()[0]
    text = f"The {CHART_WORDS[t.chart.kind]} gives a value of {join(parts)}. The highest value "
    return "Read out all the values.", f"{text}belongs to {t.name(top)}, which is {t.colour(top)}."


def _single(t: _Teller, rng: random.Random) -> tuple[str, str]:
    i = rng.randrange(len(t.chart.names))
    name, mark = t.asked(i), MARK_WORDS[t.chart.kind]
    place = f"It is the {ORDINALS[i]} of the {t.plural()}"
    if rng.random() < 0.5:
        text = (
            f"The value of {t.name(i)} is {t.value(i)}. {place}, and its colour is {t.colour(i)}."
        )
        return f"What is the value of {name}?", text
    text = f"The {mark} of {t.name(i)} is {t.colour(i)}. {place}, and its value is {t.value(i)}."
    return f"What colour is {name}?", text


def _count(t: _Teller, rng: random.Random) -> tuple[str, str]:
    colour = rng.choice(t.chart.colours)
    found = [i for i, c in enumerate(t.chart.colours) if c == colour]
    mark = MARK_WORDS[t.chart.kind]
    if len(found) == 1:
        text = f"There is one {colour} {mark}, namely {t.name(found[0])} with a value of "
        text += f"{t.value(found[0])}."
    else:
        parts = [f"{t.name(i)} with {t.value(i)}" for i in found]
        text = f"There are {COUNT_WORDS[len(found)]} {colour} {mark}s, namely {join(parts)}."
    others = [i for i in range(len(t.chart.names)) if i not in found]
    if others:
        text += f" The others are {join([f'{t.name(i)} in {t.colour(i)}' for i in others])}."
    return f"Which marks are {colour}?", text


def _sum(t: _Teller, rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(len(t.chart.names)), 2)
    text = (
        f"{t.name(a)}, the {t.colour(a)} {MARK_WORDS[t.chart.kind]}, has a value of {t.value(a)}. "
        f"{t.name(b)}, the {t.colour(b)} one, has a value of {t.value(b)}. Together they make "
        f"{t.number(t.chart.values[a] + t.chart.values[b])}."
    )
    return f"Add {t.asked(a)} and {t.asked(b)}.", text


MAKERS: dict[str, Maker] = {
    "describe": _describe,
    "extremes": _extremes,
    "compare": _compare,
    "sort": _sort,
    "colours": _colours,
    "values": _values,
    "single": _single,
    "count": _count,
    "sum": _sum,
}
"""How a question of each kind and its answer are made."""
_ASKED = (0.44, 0.12, 0.12, 0.12, 0.05, 0.05, 0.03, 0.04, 0.03)
"""How often each kind is asked: mostly those with long answers, which decoding is measured on."""
_TAUGHT = (0.36, 0.12, 0.14, 0.12, 0.05, 0.05, 0.07, 0.05, 0.04)
"""How often each kind is taught: more of those that look a name up, which is learned last."""


def ask(chart: Chart, rng: random.Random, kind: str | None = None, taught: bool = False) -> Answer:
    """Draw a question about a chart and answer it.

    Args:
        chart: what is asked about.
        rng: draws the kind, the wording and the marks of the question, never the answer.
        kind: a key of ``MAKERS`` to ask for that kind only.
        taught: draw the kind as often as training does.
    """
    if kind is None:
        kind = rng.choices(list(MAKERS), _TAUGHT if taught else _ASKED)[0]
    teller = _Teller(chart)
    fenced_question, fenced_text = MAKERS[kind](teller, rng)
    question, asked = _spans(fenced_question)
    text, spans = _spans(fenced_text)
    return Answer(
        question=question,
        text=text,
        spans=spans,
        asked=asked,
        names=tuple(teller.names),
        colours=tuple(teller.colours),
        values=tuple(teller.values),
    )


def introduce(chart: Chart, with_image: bool) -> str:
    """Return the sentence before the first question, which numbers and names the marks.

    Without an image it also says what a picture would have shown.
    """
    if with_image:
        return f"The marks are {join([f'{i} {name}' for i, name in enumerate(chart.names, 1)])}."
    told = zip(chart.names, chart.colours, chart.values, strict=True)
    parts = [f"{i} {name} in {colour} at {at}" for i, (name, colour, at) in enumerate(told, 1)]
    return f"A {CHART_WORDS[chart.kind]} has the marks {join(parts)}."
