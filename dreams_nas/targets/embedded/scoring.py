"""Comparing an answer with its chart: which names, colours and values are right.

The facts of a kind are read from both answers and paired in order, so a fact that is missing, wrong
or out of order counts as wrong once, and so does one too many. (Compared place by place, one name
left out would make all names after it wrong.)
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dreams_nas.targets.embedded.charts import COLOUR_NAMES
from dreams_nas.targets.embedded.generator import Example

F = TypeVar("F")
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
        self.names += num_matches(facts.names, names)
        self.num_names += max(len(facts.names), len(names))
        wanted, colours = _COLOUR.findall(facts.text), _COLOUR.findall(answer)
        self.colours += num_matches(wanted, colours)
        self.num_colours += max(len(wanted), len(colours))
        found = [int(number) for number in _NUMBER.findall(answer)]
        self.values += num_matches(facts.values, found, lambda a, b: abs(a - b) <= 1)
        self.values_exact += num_matches(facts.values, found)
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


def num_matches(
    wanted: Sequence[F], found: Sequence[F], same: Callable[[F, F], bool] = operator.eq
) -> int:
    """Return how many facts are right: the most that can be paired in order."""
    best = [0] * (len(found) + 1)
    for fact in wanted:
        before = best
        best = [0]
        for i, other in enumerate(found):
            best.append(max(before[i + 1], best[i], before[i] + same(fact, other)))
    return best[-1]


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
