"""What the target says next: its likeliest token, or a draw from its warped distribution.

A draw per verified row makes any deterministic draft tree exact: the target's own draw after a row
either equals a drafted child or ends the round as its bonus token, whatever was drafted.

Shapes: Q verified rows, V vocabulary, W head rows of a draft, T tokens so far.
"""

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dreams_nas.decode.settings import GenerationSettings

_COLDEST = 1e-6
"""Lowest temperature: below it nothing changes, and at last a division by it overflows."""


def build_warpers(settings: GenerationSettings) -> LogitsProcessorList:
    """transformers' warpers of some settings, in its order; none for greedy ones."""
    found: list[LogitsProcessor] = []
    if settings.is_random:
        if settings.temperature not in (None, 1):
            found.append(TemperatureLogitsWarper(max(_COLDEST, float(settings.temperature or 1))))
        if settings.top_k:
            found.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p is not None and settings.top_p < 1:
            found.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p:
            found.append(MinPLogitsWarper(settings.min_p))
    return LogitsProcessorList(found)


class Chooser:
    """Chooses tokens for one request."""

    def __init__(
        self,
        settings: GenerationSettings,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> None:
        """Take `generator` for all draws; the global one of torch when None."""
        self.settings = settings
        self.generator = generator
        self._warpers = build_warpers(settings)
        penalty = settings.repetition_penalty
        self._penalty = (
            None if penalty in (None, 1) else RepetitionPenaltyLogitsProcessor(float(penalty or 1))
        )
        self._ids_T = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def wants_history(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self._penalty is not None

    def note(self, tokens_T: Tensor) -> None:
        """Add committed tokens to the history, where logits depend on it."""
        if self.wants_history:
            self._ids_T = torch.cat([self._ids_T, tokens_T])

    def choose(self, logits_QV: Tensor, paths_QL: Tensor | None = None) -> Tensor:
        """The token after each row, [Q].

        Args:
            logits_QV: The target's logits.
            paths_QL: Tokens behind the history that each row has read, itself included; a token
                may stand there twice. None where the history is all of it.
        """
        if not self.settings.is_random:
            scores_QV = logits_QV if self._penalty is None else self._scores(logits_QV, paths_QL)
            return scores_QV.argmax(dim=-1)
        return self.draw(self.probabilities(logits_QV, paths_QL))

    def probabilities(self, logits_QV: Tensor, paths_QL: Tensor | None = None) -> Tensor:
        """The warped distribution after each row, [Q, V], in float32 or better."""
        return self.warp(self._scores(logits_QV, paths_QL))

    def warp(self, scores_QV: Tensor) -> Tensor:
        """Warp logits of any vocabulary into a distribution; used for the draft's, too."""
        scores_QV = _at_least_float32(scores_QV)
        # The largest at 0: a tiny temperature then gives -inf, never inf - inf.
        scores_QV = scores_QV - scores_QV.amax(dim=-1, keepdim=True)
        return self._warpers(self._ids_T, scores_QV).softmax(dim=-1)

    def draw(self, probabilities_QV: Tensor) -> Tensor:
        """One token of each distribution, [Q]."""
        # What `multinomial` does, without its look at the values on the host.
        noise_QV = torch.empty_like(probabilities_QV).exponential_(generator=self.generator)
        return (probabilities_QV / noise_QV).argmax(dim=-1)

    def _scores(self, logits_QV: Tensor, paths_QL: Tensor | None) -> Tensor:
        """Logits with the penalty, which depends on what each row has read."""
        if self._penalty is None:
            return logits_QV
        logits_QV = _at_least_float32(logits_QV)  # as transformers does, or penalties make ties
        ids_QT = self._ids_T.expand(len(logits_QV), -1)
        if paths_QL is not None:
            ids_QT = torch.cat([ids_QT, paths_QL], dim=1)
        scores_QV: Tensor = self._penalty(ids_QT, logits_QV)
        return scores_QV


def _at_least_float32(logits_QV: Tensor) -> Tensor:
    return logits_QV.float() if logits_QV.element_size() < 4 else logits_QV


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """A generator of its own for a request."""
    return torch.Generator(device=device).manual_seed(seed)
