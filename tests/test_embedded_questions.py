"""Questions, answers and how answers are scored."""

import re
from random import Random

import pytest

from dreams_nas.core.errors import UserError
from dreams_nas.targets.embedded.charts import COLOUR_NAMES, Chart, build_chart
from dreams_nas.targets.embedded.generator import build_example, conversations, examples
from dreams_nas.targets.embedded.questions import MAKERS, ask, introduce
from dreams_nas.targets.embedded.scoring import Score, find_names

CHART = Chart(
    table="any",
    kind="bars",
    names=("Ana", "Bo", "Cy"),
    colours=("red", "blue", "red"),
    values=(12, 3, 9),
    thickness=0.6,
)


def _said(kind: str) -> dict[str, str]:
    """Return every wording of a kind of question about ``CHART``, with its answer."""
    return {a.question: a.text for a in (ask(CHART, Random(s), kind) for s in range(60))}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_the_same_question_always_has_the_same_answer(kind: str) -> None:
    for index in range(5):
        chart = build_chart("train", index)
        answers: dict[str, set[str]] = {}
        for seed in range(40):
            answer = ask(chart, Random(seed), kind)
            answers.setdefault(answer.question, set()).add(answer.text)
        assert all(len(texts) == 1 for texts in answers.values())


@pytest.mark.parametrize("kind", list(MAKERS))
def test_facts_are_those_said_in_the_answer(kind: str) -> None:
    for index in range(20):
        chart = build_chart("train", index)
        answer = ask(chart, Random(index), kind)
        assert find_names(answer.text, chart.names) == list(answer.names)
        assert tuple(int(n) for n in re.findall(r"\d+", answer.text)) == answer.values
        colours = re.findall("|".join(COLOUR_NAMES), answer.text)
        assert set(answer.colours) <= set(colours) <= set(chart.colours)


@pytest.mark.parametrize("kind", list(MAKERS))
def test_spans_point_at_the_words_about_each_mark(kind: str) -> None:
    for index in range(10):
        chart = build_chart("train", index)
        answer = ask(chart, Random(index), kind)
        assert [a for a, _, _ in answer.spans] == sorted(a for a, _, _ in answer.spans)
        for start, end, mark in answer.spans:
            facts = (chart.names[mark], chart.colours[mark], str(chart.values[mark]))
            assert answer.text[start:end] in facts
        assert len(answer.spans) >= len(answer.names) + len(answer.colours)
        assert not set("\0\1") & set(answer.text)


def test_answers_are_right() -> None:
    assert _said("describe")["Describe the chart."] == (
        "This is a bar chart with three bars. Ana is red and reaches 12. Bo is blue and reaches 3. "
        "Cy is red and reaches 9. The highest is Ana and the lowest is Bo."
    )
    assert _said("extremes")["What is the range of the values?"] == (
        "The values run from 3 for Bo, which is blue, up to 12 for Ana, which is red. "
        "So the range is 9."
    )
    assert _said("compare")["Which one is higher, Bo or Cy?"] == (
        "Cy is higher. It is red and reaches 9, whereas Bo is blue and reaches only 3, which makes "
        "a difference of 6."
    )
    assert _said("sort")["Sort the marks from lowest to highest."] == (
        "From lowest to highest, the bars are Bo with 3, Cy with 9 and Ana with 12. The lowest one "
        "is blue and the highest one is red."
    )
    assert _said("colours")["What colours are the marks?"].endswith("two different colours in all.")
    assert _said("count")["Which marks are red?"] == (
        "There are two red bars, namely Ana with 12 and Cy with 9. The others are Bo in blue."
    )
    assert _said("sum")["Add Ana and Bo."].endswith("Together they make 15.")
    assert _said("single")["What colour is Cy?"] == (
        "The bar of Cy is red. It is the third of the three bars, and its value is 9."
    )
    assert _said("values")["Read out all the values."].startswith(
        "The bar chart gives a value of 12 for Ana, 3 for Bo and 9 for Cy."
    )


def test_a_prompt_names_the_marks_and_shows_nothing_else() -> None:
    assert introduce(CHART, with_image=True) == "The marks are 1 Ana, 2 Bo and 3 Cy."
    assert introduce(CHART, with_image=False) == (
        "A bar chart has the marks 1 Ana in red at 12, 2 Bo in blue at 3 and 3 Cy in red at 9."
    )


def test_most_answers_are_long_enough_to_measure_decoding_on() -> None:
    words = sorted(len(example.answer.split()) for example in examples("test", 300))
    assert words[len(words) // 4] >= 28
    assert words[-1] <= 90


def test_conversations_are_prompts_without_answers() -> None:
    found = list(conversations("score", 4, seed=2))
    assert [c.id for c in found] == [f"score-2-{i:06d}" for i in range(4)]
    for conversation, example in zip(found, examples("score", 4, seed=2), strict=True):
        assert conversation.split == "score"
        assert conversation.images[0].tobytes() == example.image.tobytes()
        assert conversation.messages == [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": example.question}],
            }
        ]


def test_conversations_of_an_unknown_split_are_refused() -> None:
    with pytest.raises(UserError, match="choices: train, choose, score, test"):
        next(iter(conversations("valid", 1)))


def _report(change: dict[str, str]) -> dict[str, float | int | None]:
    """Score example 1 of the train split with words of its answer replaced."""
    example = build_example("train", 1)
    answer = example.answer
    for old, new in change.items():
        assert old in answer
        answer = answer.replace(old, new, 1)
    score = Score()
    score.add(example, answer)
    return score.report()


def test_the_expected_answer_scores_one() -> None:
    score = Score()
    for example in examples("score", 50):
        score.add(example, example.answer)
    shares = score.report()
    assert shares.pop("num_answers") == 50
    assert set(shares.values()) == {1.0}


def test_wrong_facts_count_each_in_its_own_kind() -> None:
    example = build_example("train", 1)
    name, colour = example.facts.names[0], example.facts.colours[0]
    num_names, num_values = len(example.facts.names), len(example.facts.values)
    other = next(c for c in COLOUR_NAMES if c not in example.chart.colours)
    value = example.facts.values[0]

    wrong_name = _report({name: example.chart.names[-1]})
    assert wrong_name["names"] == round(1 - 1 / num_names, 4)
    assert wrong_name["colours"] == wrong_name["values_within_one"] == 1.0

    assert _report({colour: other})["colours"] < 1.0  # type: ignore[operator]
    by_one = _report({f" {value}": f" {value + 1}"})
    assert by_one["values_within_one"] == 1.0
    assert by_one["values_exact"] == round(1 - 1 / num_values, 4)
    assert _report({f" {value}": f" {value + 2}"})["values_within_one"] == by_one["values_exact"]


def test_missing_and_surplus_facts_are_wrong() -> None:
    example = build_example("train", 1)
    score = Score()
    score.add(example, "")
    assert score.report() == {
        "names": 0.0,
        "colours": 0.0,
        "values_within_one": 0.0,
        "values_exact": 0.0,
        "num_answers": 1,
    }
    score = Score()
    score.add(example, f"{example.answer} {example.chart.names[0]} is red and reaches 4.")
    surplus = score.report()
    assert all(surplus[kind] < 1.0 for kind in ("names", "colours", "values_within_one"))  # type: ignore[operator]


def test_nothing_compared_is_null() -> None:
    assert Score().report()["names"] is None
