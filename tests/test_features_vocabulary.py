"""The order of the vocabulary, a prefix of which a draft proposes."""

import pytest
import torch
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.features.vocabulary import coverage, token_counts, vocabulary_order


class FakeAnswers:
    def __init__(self, *answers: list[int]) -> None:
        self.answers = answers

    def __len__(self) -> int:
        return len(self.answers)

    def answer(self, index: int) -> Tensor:
        return torch.tensor(self.answers[index], dtype=torch.int64)


ANSWERS = FakeAnswers([5, 5, 3, 2], [5, 1, 3, 2], [1, 7])


def test_order_is_by_frequency_then_id_with_ends_first() -> None:
    order = vocabulary_order(ANSWERS, 9, always_keep=(8,))
    assert order.tolist() == [8, 5, 1, 2, 3, 7, 0, 4, 6]
    assert order.dtype == torch.int64
    assert vocabulary_order(ANSWERS, 9).tolist() == [5, 1, 2, 3, 7, 0, 4, 6, 8]


def test_every_prefix_holds_all_ends() -> None:
    for ends in ((2,), (8, 0), (0, 0, 8)):
        order = vocabulary_order(ANSWERS, 9, always_keep=ends)
        assert set(order[: len(set(ends))].tolist()) == set(ends)
        assert sorted(order.tolist()) == list(range(9))


def test_counts_and_coverage_are_shares_of_answer_tokens() -> None:
    assert token_counts(ANSWERS, 9).tolist() == [0, 2, 2, 2, 0, 3, 0, 1, 0]
    order = vocabulary_order(ANSWERS, 9, always_keep=(2,))
    # 2 (twice) and 5 (three times) of ten tokens make two rows of nine.
    assert coverage(ANSWERS, order, (0.2, 1.0)) == {0.2: 0.5, 1.0: 1.0}
    assert coverage(FakeAnswers(), order, (1.0,)) == {1.0: None}


@pytest.mark.parametrize(
    ("vocab_size", "keep", "text"),
    [(6, (), "holds token 7, but the vocabulary has 6"), (9, (9,), "token 9 to keep.*0..8")],
)
def test_tokens_outside_the_vocabulary_are_refused(
    vocab_size: int, keep: tuple[int, ...], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        vocabulary_order(ANSWERS, vocab_size, keep)
