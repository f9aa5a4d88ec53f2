"""Charts, questions and conversations of the embedded target, without end and without torch.

Everything is a function of (split, number, seed): the same call gives the same picture and words
on every machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image

from dreams_nas.targets.embedded.charts import Chart, build_chart, draw_chart
from dreams_nas.targets.embedded.questions import Answer, ask, introduce


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question about one chart, with the answer and the facts in it."""

    id: str
    chart: Chart
    image: Image.Image
    """RGB, 96 x 96."""
    question: str
    """The user's whole text: the names of the marks, then the question."""
    answer: str
    facts: Answer
    """The facts in the order in which the answer says them."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A prompt in the form that ``collect`` reads; the target writes the answer itself."""

    id: str
    split: str
    images: list[Image.Image]
    messages: list[dict[str, Any]]
    """Chat messages in the form of Hugging Face; the image part comes before the text part."""


def build_example(split: str, index: int, seed: int = 0, for_vocabulary: bool = False) -> Example:
    """Build example number ``index`` of a split: a chart, a question, its answer.

    Args:
        split: ``train``, ``choose``, ``score`` or ``test``.
        index: number of the example, 0 or more.
        seed: root seed.
        for_vocabulary: with invented names and the kinds of questions that training asks, for the
            text that the vocabulary is learned from.
    """
    chart = build_chart(split, index, seed, with_inventions=for_vocabulary)
    rng = random.Random(f"question/{seed}/{split}/{index}")
    answer = ask(chart, rng, taught=for_vocabulary)
    return Example(
        id=f"{split}-{seed}-{index:06d}",
        chart=chart,
        image=draw_chart(chart),
        question=f"{introduce(chart, with_image=True)} {answer.question}",
        answer=answer.text,
        facts=answer,
    )


def examples(split: str, count: int, seed: int = 0) -> Iterator[Example]:
    """Yield ``count`` examples of a split.

    Args:
        split: ``train``, ``choose``, ``score`` or ``test``; no two share a table.
        count: how many.
        seed: root seed.

    Raises:
        UserError: if the split is unknown.
    """
    return (build_example(split, index, seed) for index in range(count))


def user_message(text: str, num_images: int = 1) -> dict[str, Any]:
    """Return a chat message of the user: images first, then the text."""
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(num_images)]
    return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


def conversations(split: str, count: int, seed: int = 0) -> Iterator[Conversation]:
    """Yield ``count`` prompts of a split, one image and one question each, without answers."""
    for example in examples(split, count, seed):
        yield Conversation(
            id=example.id,
            split=split,
            images=[example.image],
            messages=[user_message(example.question)],
        )
