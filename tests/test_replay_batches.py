"""Recordings become rows: features, tokens, images and supervision land where they belong."""

import pytest
import torch
from recordings import made_up_recording

from dreams_nas.core.errors import UserError
from dreams_nas.replay.batches import build_batch, length_buckets, prompt_rows

HIDDEN = 8
PROMPT = [11, 90, 90, 90, 90, 12, 13]
ANSWER = [21, 22, 23, 24]
EMBEDDING = torch.arange(100.0, dtype=torch.float64)[:, None].expand(100, HIDDEN).contiguous()


def embed(tokens: torch.Tensor) -> torch.Tensor:
    return EMBEDDING[tokens]


def test_rows_hold_the_feature_of_their_position_and_the_token_after_it() -> None:
    recording = made_up_recording(ANSWER, prompt=PROMPT, hidden=HIDDEN, image_spans=((1, 5),))
    batch = build_batch([recording], (0,), 1.0, embed, dtype=torch.float64)
    rows = batch.rows
    # 11 tokens: rows 0..8, since the last root is the last token but one.
    assert rows.positions_BT.tolist() == [list(range(9))]
    assert torch.equal(rows.features_BTF[0], recording.features((0,))[:9])
    assert rows.tokens_BR.tolist() == [[21, 22, 23]]
    assert batch.next_tokens_BR.tolist() == [[22, 23, 24]]
    # Image tokens at positions 1..4 are the tokens of rows 0..3.
    assert torch.equal(rows.embeddings_BTD[0, :4], recording.image_embeddings_MD)
    assert rows.embeddings_BTD[0, 4:, 0].tolist() == [12, 13, 21, 22, 23]


def test_supervision_is_the_last_layer_at_the_root_and_its_successors() -> None:
    recording = made_up_recording(ANSWER, prompt=PROMPT, hidden=HIDDEN, layer_ids=(0, 3))
    batch = build_batch([recording], (0,), 1.0, embed, dtype=torch.float64)
    assert torch.equal(batch.states_BRD[0], recording.features((3,))[7:10])
    assert batch.tokens_BR(1).tolist() == [[22, 23, 24]]
    assert batch.tokens_BR(3).tolist() == [[24, 0, 0]]
    # The first token that is drafted is the answer's second; user turns are never supervised.
    assert batch.has_token_BR(1).tolist() == [[True, True, True]]
    assert batch.has_token_BR(3).tolist() == [[True, False, False]]
    assert batch.num_levels == 3


def test_dropped_image_tokens_take_their_rows_with_them() -> None:
    recording = made_up_recording(ANSWER, prompt=PROMPT, hidden=HIDDEN, image_spans=((1, 5),))
    recording.importance_M.copy_(torch.tensor([0.1, 0.4, 0.2, 0.4]))
    half = build_batch([recording], (1,), 0.5, embed, dtype=torch.float64)
    # Positions 2 and 4 stay, so rows 1 and 3 do; all text rows stay.
    assert half.rows.positions_BT.tolist() == [[1, 3, 4, 5, 6, 7, 8]]
    kept = recording.image_embeddings_MD[[1, 3]]
    assert torch.equal(half.rows.embeddings_BTD[0, :2], kept)
    assert torch.equal(half.rows.features_BTF[0], recording.features((1,))[[1, 3, 4, 5, 6, 7, 8]])
    blind = build_batch([recording], (1,), 0.0, embed, dtype=torch.float64)
    assert blind.rows.positions_BT.tolist() == [[4, 5, 6, 7, 8]]
    assert len(prompt_rows(recording, 0.5)) == 5
    assert half.next_tokens_BR.tolist() == blind.next_tokens_BR.tolist() == [[22, 23, 24]]


def test_shorter_samples_are_padded_on_the_left() -> None:
    long = made_up_recording(ANSWER, prompt=PROMPT, hidden=HIDDEN)
    short = made_up_recording([31, 32], prompt=[11, 12], hidden=HIDDEN, seed=1)
    batch = build_batch([short, long], (0, 1), 1.0, embed, dtype=torch.float64)
    assert batch.rows.num_rows_B.tolist() == [2, 9]
    assert batch.rows.num_roots_B.tolist() == [1, 3]
    assert batch.rows.positions_BT[0].tolist() == [0] * 7 + [0, 1]
    assert batch.is_root_BR.tolist() == [[False, False, True], [True, True, True]]
    assert batch.has_token_BR(2).tolist() == [[False, False, False], [True, True, False]]
    assert batch.next_tokens_BR.tolist() == [[0, 0, 32], [22, 23, 24]]
    assert torch.equal(batch.rows.features_BTF[0, -2:], short.features_TF[:2])


def test_an_answer_of_one_token_is_refused_by_name() -> None:
    lonely = made_up_recording([31], prompt=[11, 12], hidden=HIDDEN, seed=7)
    with pytest.raises(UserError, match=r"'made-up-7' has an answer of 1 token.*2 or more"):
        build_batch([lonely], (0,), 1.0, embed)


def test_buckets_hold_everything_once_within_the_budget() -> None:
    lengths = [5, 30, 7, 6, 100, 8, 31]
    buckets = length_buckets(lengths, 32)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(7))
    for bucket in buckets:
        assert len(bucket) == 1 or len(bucket) * max(lengths[i] for i in bucket) <= 32
    assert [4] in buckets
    assert len(buckets) < len(lengths)
