"""Prompts as the target reads them, and a plan of what to collect: no target pass is made here.

Nothing is ever truncated: a prompt that does not fit is left out and counted, so no image is cut.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from dreams_nas.core.console import progress
from dreams_nas.core.errors import UserError
from dreams_nas.features.conversations import Conversation
from dreams_nas.features.shards import Skipped
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.prompts import prepare_model_inputs
from dreams_nas.targets.protocol import TargetInputs


class PlannedPrompt(NamedTuple):
    """A prompt that fits, with its sizes; its tensors are made again when its turn comes."""

    conversation: Conversation
    num_tokens: int
    num_image_tokens: int


@dataclass(frozen=True)
class Plan:
    """What to collect."""

    prompts: tuple[PlannedPrompt, ...]
    """Prompts that fit, the shortest first, so that a batch holds little padding."""
    skipped: tuple[Skipped, ...]
    """Prompts that do not."""

    def shards(self, shard_size: int) -> list[tuple[PlannedPrompt, ...]]:
        """The prompts of each shard."""
        starts = range(0, len(self.prompts), shard_size)
        return [self.prompts[start : start + shard_size] for start in starts]


def plan_prompts(
    target: HuggingFaceTarget,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    max_length: int,
    quiet: bool = False,
) -> Plan:
    """Prepare every prompt once, which checks it, and keep its sizes.

    Raises:
        UserError: An image cannot be read, or a prompt's image tokens are not as many as its
            visual features.
    """
    prompts: list[PlannedPrompt] = []
    skipped: list[Skipped] = []
    with progress("checking prompts", len(conversations), quiet) as bar:
        for conversation in conversations:
            num_tokens, inputs = read_prompt(target, conversation, max_length - max_new_tokens)
            if inputs is None:
                skipped.append(
                    Skipped(
                        id=conversation.id,
                        reason="prompt and longest answer do not fit",
                        needed_tokens=num_tokens + max_new_tokens,
                        limit_tokens=max_length,
                    )
                )
            else:
                mask = inputs.image_mask_T
                num_image_tokens = 0 if mask is None else int(mask.sum())
                prompts.append(PlannedPrompt(conversation, num_tokens, num_image_tokens))
            bar.advance()
    # Sorting is stable: the plan depends on the prompts alone, also in the next run.
    prompts.sort(key=lambda prompt: prompt.num_tokens)
    return Plan(tuple(prompts), tuple(skipped))


def read_prompt(
    target: HuggingFaceTarget, conversation: Conversation, limit: int
) -> tuple[int, TargetInputs | None]:
    """Number of tokens of a prompt, and the prompt itself unless that is above `limit`.

    Raises:
        UserError: As `plan_prompts`; names the sample.
    """
    images = conversation.load_images()
    with _naming(conversation):
        # `prepare` in two steps, since it refuses a long prompt without giving its length.
        input_ids_T, found, sizes = prepare_model_inputs(target, conversation.messages, images)
        if len(input_ids_T) > limit:
            return len(input_ids_T), None
        tensors = {key: found[key] for key in target.input_names if key in found}
        return len(input_ids_T), target.build_inputs(input_ids_T, tensors, sizes)


@contextmanager
def _naming(conversation: Conversation) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{conversation}: {error}") from error
