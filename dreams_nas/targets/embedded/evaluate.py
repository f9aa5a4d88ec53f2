"""Evaluation of the embedded target: whole answers, batched greedy, compared fact by fact."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from dreams_nas.core.console import progress, say
from dreams_nas.core.errors import UserError
from dreams_nas.targets.embedded.generator import Example, examples, user_message
from dreams_nas.targets.embedded.scoring import Score

MAX_NEW_TOKENS = 160
"""More than the longest answer of the generator."""
NUM_SHOWN = 3
"""Answers printed beside the expected ones."""


def load_target(path: Path) -> tuple[LlavaForConditionalGeneration, Any]:
    """Load the target in fp32 and its processor, without a network.

    Raises:
        UserError: if the folder holds no target.
    """
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} holds no target (no config.json); train one with "
            "`python -m dreams_nas.targets.embedded train` or give --target FOLDER"
        )
    model = LlavaForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, local_files_only=True
    )
    return model.eval(), AutoProcessor.from_pretrained(path, local_files_only=True)


def generate_answers(
    model: LlavaForConditionalGeneration, processor: Any, batch: list[Example]
) -> list[str]:
    """Return the greedy answer to each example of a batch."""
    prompts = [
        processor.apply_chat_template([user_message(e.question)], add_generation_prompt=True)
        for e in batch
    ]
    inputs = processor(
        images=[e.image for e in batch], text=prompts, padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answers = processor.batch_decode(
        ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return [answer.strip() for answer in answers]


def answered(
    model: LlavaForConditionalGeneration, processor: Any, asked: list[Example], batch: int
) -> Iterator[tuple[Example, str]]:
    """Yield every example with the target's answer, ``batch`` at a time."""
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        yield from zip(part, generate_answers(model, processor, part), strict=True)


def evaluate(
    path: Path, *, split: str = "score", count: int = 240, batch: int = 24, seed: int = 0
) -> dict[str, float | int | None]:
    """Generate ``count`` answers on a split and return the shares of facts that are right.

    Args:
        path: folder of the target.
        split: tables to draw charts from.
        count: answers.
        batch: answers generated at a time.
        seed: seed of the charts; training uses seed 0 of the train split.

    Returns:
        ``names``, ``colours``, ``values_within_one``, ``values_exact`` (shares, or null where
        there was nothing to compare) and ``num_answers``.

    Raises:
        UserError: if the folder holds no target.
        UserError: if the split is unknown.
    """
    asked = list(examples(split, count, seed))
    model, processor = load_target(path)
    score = Score()
    began = time.monotonic()
    with progress("generating answers", total=count) as bar:
        for example, answer in answered(model, processor, asked, batch):
            score.add(example, answer)
            bar.advance()
            if score.num_answers <= NUM_SHOWN:
                say(f"Q {example.question}\nA {answer}\n= {example.answer}")
    say(f"{count} answers in {time.monotonic() - began:.0f} s")
    return score.report()
