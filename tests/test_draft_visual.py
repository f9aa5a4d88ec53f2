"""Which image tokens a draft sees: counts, ties, several images, rows against tokens."""

import pytest
import torch

from dreams_nas.draft.visual import kept_rows, num_kept

SPANS = ((2, 12), (15, 25))
NUM_ROWS = 30


@pytest.mark.parametrize(
    ("keep_ratio", "expected"), [(0.0, 0), (0.1, 1), (0.25, 3), (0.3, 3), (0.31, 4), (1.0, 10)]
)
def test_the_count_is_rounded_up_for_every_image(keep_ratio: float, expected: int) -> None:
    assert num_kept(SPANS, keep_ratio) == (expected, expected)


def importance() -> torch.Tensor:
    values = torch.zeros(NUM_ROWS)
    values[torch.tensor([3, 7, 11])] = torch.tensor([0.2, 1.0, 0.5])
    values[torch.tensor([15, 16, 24])] = torch.tensor([0.1, 0.1, 0.1])
    return values


def dropped_tokens(keep_ratio: float) -> list[int]:
    rows = kept_rows(NUM_ROWS, SPANS, keep_ratio, importance())
    return sorted({*range(1, NUM_ROWS + 1)} - {int(row) + 1 for row in rows})


def test_a_row_goes_if_and_only_if_its_token_is_a_dropped_image_token() -> None:
    dropped = dropped_tokens(0.2)
    kept = [t for start, stop in SPANS for t in range(start, stop) if t not in dropped]
    assert kept == [7, 11, 15, 16]  # the two most important of each; ties to the lower index
    assert all(any(start <= t < stop for start, stop in SPANS) for t in dropped)


def test_rows_ascend_and_hold_all_text() -> None:
    rows = kept_rows(NUM_ROWS, SPANS, 0.2, importance()).tolist()
    assert rows == sorted(set(rows))
    assert rows[-1] == NUM_ROWS - 1  # the first answer token's row
    assert len(rows) == NUM_ROWS - 20 + 4


def test_keep_ratio_zero_hides_all_and_one_keeps_all() -> None:
    none = kept_rows(NUM_ROWS, SPANS, 0.0, None)
    assert len(none) == NUM_ROWS - 20
    assert kept_rows(NUM_ROWS, SPANS, 1.0, None).tolist() == list(range(NUM_ROWS))
    assert kept_rows(NUM_ROWS, (), 0.5, None).tolist() == list(range(NUM_ROWS))


def test_an_image_at_the_very_beginning_has_no_row_for_its_first_token() -> None:
    rows = kept_rows(6, ((0, 4),), 0.5, torch.tensor([1.0, 0.1, 0.1, 0.9, 0.0, 0.0]))
    assert rows.tolist() == [2, 3, 4, 5]
