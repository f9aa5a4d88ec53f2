"""From planned prompts to recordings: answers first, then one pass for the features."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dreams_nas.core.console import Progress
from dreams_nas.features.answers import generate_answers, split_batches
from dreams_nas.features.passes import record_features
from dreams_nas.features.prompts import PlannedPrompt, read_prompt
from dreams_nas.features.recording import Recording
from dreams_nas.features.shards import Skipped
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs


class Recorder:
    """Records the prompts of one shard after the other, in batches of a token budget."""

    def __init__(
        self,
        target: HuggingFaceTarget,
        target_layer_ids: tuple[int, ...],
        store_dtype: torch.dtype,
        max_new_tokens: int,
        batch_tokens: int,
    ) -> None:
        """Keep what is the same for all prompts.

        Args:
            target: Who answers.
            target_layer_ids: Layers to record, ascending, the last block among them.
            store_dtype: Precision of the features.
            max_new_tokens: Longest answer, tokens.
            batch_tokens: Budget of a batch, tokens with padding.
        """
        self._target, self._layer_ids, self._dtype = target, target_layer_ids, store_dtype
        self._max_new_tokens, self._batch_tokens = max_new_tokens, batch_tokens

    def record(
        self, prompts: Sequence[PlannedPrompt], bar: Progress
    ) -> tuple[list[Recording], list[Skipped]]:
        """Answer prompts and read their features.

        Returns:
            Recordings in the order of the prompts, and the prompts that gave none.
        """
        recordings: dict[str, Recording] = {}
        skipped: list[Skipped] = []
        lengths = [prompt.num_tokens + self._max_new_tokens for prompt in prompts]
        for batch in split_batches(prompts, lengths, self._batch_tokens):
            rows: list[tuple[str, TargetInputs, Tensor]] = []
            inputs = [self._read(prompt) for prompt in batch]
            answers = generate_answers(self._target, inputs, self._max_new_tokens)
            for prompt, read, answer in zip(batch, inputs, answers, strict=True):
                if problem := self._answer_problem(answer):
                    skipped.append(Skipped(id=prompt.conversation.id, reason=problem))
                else:
                    rows.append((prompt.conversation.id, read, answer))
            recordings.update(self._read_features(rows))
            bar.advance(len(batch))
        ids = [prompt.conversation.id for prompt in prompts]
        return [recordings[id_] for id_ in ids if id_ in recordings], skipped

    def _read(self, prompt: PlannedPrompt) -> TargetInputs:
        num_tokens, inputs = read_prompt(self._target, prompt.conversation, prompt.num_tokens)
        assert inputs is not None, f"{prompt.conversation} grew to {num_tokens} tokens"
        return inputs

    def _read_features(self, rows: list[tuple[str, TargetInputs, Tensor]]) -> dict[str, Recording]:
        """Batched anew by the true lengths, since answers differ in theirs."""
        rows.sort(key=_length)
        found: dict[str, Recording] = {}
        for part in split_batches(rows, [_length(row) for row in rows], self._batch_tokens):
            ids, prompts, answers = zip(*part, strict=True)
            for recording in record_features(
                self._target, ids, prompts, answers, self._layer_ids, self._dtype
            ):
                found[recording.id] = recording
        return found

    def _answer_problem(self, answer: Tensor) -> str | None:
        """Why an answer cannot be learnt from, or None."""
        ends = torch.tensor(self._target.spec.eos_token_ids, device=answer.device)
        if bool(torch.isin(answer, ends).all()):
            return "the answer is empty"
        image_token = self._target.image_token_id
        # Such a token would ask for a feature of an image that is not there.
        if image_token is not None and bool(answer.eq(image_token).any()):
            return "the answer holds the token that stands for an image"
        return None


def _length(row: tuple[str, TargetInputs, Tensor]) -> int:
    return len(row[1].input_ids_T) + len(row[2])
