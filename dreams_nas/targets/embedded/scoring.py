"""Comparing an answer with its chart: which names, colours and values are right.

The facts of a kind are read from both answers in order and compared place by place, so a fact that
is missing, wrong or out of order counts as wrong, and so does one too many.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dreams_nas.targets.embedded.charts import COLOUR_NAMES
from dreams_nas.targets.embedded.generator import Example

_COLOUR = re.compile(rf"\b({'|'.join(COLOUR_NAMES)})\b")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w])")


@dataclass
class Score:
    """Counts over answers: facts right and facts compared, by kind."""

    num_answers: int = 0
    names: int = 0
    num_names: int = 0
    colours: int = 0
    num_colours: int = 0
    values: int = 0
    num_values: int = 0
    values_exact: int = 0

    def add(self, example: Example, answer: str) -> None:
        """Count the facts of one generated answer."""
        facts = example.facts
        self.num_answers += 1
        names = find_names(answer, example.chart.names)
        self.names += _matches(facts.names, names)
        self.num_names += max(len(facts.names), len(names))
        colours = _COLOUR.findall(answer)
        self.colours += _matches(_COLOUR.findall(facts.text), colours)
        self.num_colours += max(len(_COLOUR.findall(facts.text)), len(colours))
        found = [int(number) for number in _NUMBER.findall(answer)]
        pairs = list(zip(facts.values, found, strict=False))
        self.values += sum(abs(a - b) <= 1 for a, b in pairs)
        self.values_exact += sum(a == b for a, b in pairs)
        self.num_values += max(len(facts.values), len(found))

    def report(self) -> dict[str, float | int | None]:
        """Return shares by kind, null where there was nothing to compare."""
        return {
            "names": _share(self.names, self.num_names),
            "colours": _share(self.colours, self.num_colours),
            "values_within_one": _share(self.values, self.num_values),
            "values_exact": _share(self.values_exact, self.num_values),
            "num_answers": self.num_answers,
        }


def find_names(answer: str, names: Sequence[str]) -> list[str]:
    """Return the names of marks said in an answer, in order."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.findall(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b", answer)


def _matches(wanted: Sequence[str], found: Sequence[str]) -> int:
    return sum(a == b for a, b in zip(wanted, found, strict=False))


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
