"""Which tokens a draft proposes: the order of the vocabulary by frequency in the answers.

A draft vocabulary is a prefix of this order, so one order serves every size (the way of FR-Spec,
counted on the target's own answers). Shapes: V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.space.arch import round_half_up


class Answers(Protocol):
    """The part of a feature store that counting needs."""

    def __len__(self) -> int:
        """Recordings."""

    def answer(self, index: int) -> Tensor:
        """Answer tokens of a recording, int64."""


def token_counts(answers: Answers, vocab_size: int) -> Tensor:
    """How often each token occurs in the answers, [V] int64.

    Raises:
        UserError: An answer holds a token outside the vocabulary.
    """
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(answers)):
        tokens = answers.answer(index)
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise UserError(
                f"an answer holds token {int(tokens.max())}, but the vocabulary has {vocab_size}; "
                "give the vocabulary of the target that answered"
            )
        counts_V += torch.bincount(tokens, minlength=vocab_size)
    return counts_V


def vocabulary_order(answers: Answers, vocab_size: int, always_keep: Sequence[int] = ()) -> Tensor:
    """All token ids, those to keep first, then the most frequent; ties by id.

    Args:
        answers: A feature store.
        vocab_size: V, rows of the target's head.
        always_keep: Tokens that every prefix shall hold: the ends of an answer.

    Returns:
        [V] int64, a permutation.

    Raises:
        UserError: A token outside the vocabulary.
    """
    counts_V = token_counts(answers, vocab_size)
    for token in set(always_keep):
        if not 0 <= token < vocab_size:
            raise UserError(f"token {token} to keep: should be in 0..{vocab_size - 1}")
        counts_V[token] += torch.iinfo(torch.int64).max // 2
    return torch.sort(counts_V, descending=True, stable=True).indices


def coverage(
    answers: Answers, order_V: Tensor, shares: Sequence[float]
) -> dict[float, float | None]:
    """Share of the answer tokens that a draft with each share of the vocabulary can propose.

    Returns:
        Covered share, 0 to 1, by share of the vocabulary; None without any answer token.
    """
    counts_V = token_counts(answers, len(order_V))[order_V]
    total = int(counts_V.sum())
    sizes = {share: max(1, round_half_up(share * len(order_V))) for share in shares}
    return {
        share: int(counts_V[:size].sum()) / total if total else None
        for share, size in sizes.items()
    }
