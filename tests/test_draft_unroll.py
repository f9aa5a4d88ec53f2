"""Unrolled training is drafting: its logits equal the decode path, level by level."""

import pytest
import torch
from draft_models import build_draft
from recordings import record_answer
from target_models import build_target
from torch import Tensor

from dreams_nas.draft.cache import DraftCache
from dreams_nas.draft.layers import build_rotary, forward_rows, fuse, head
from dreams_nas.draft.unroll import shift_left, unroll, unroll_mask
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.features.recording import Recording
from dreams_nas.replay.batches import build_batch, prompt_rows
from dreams_nas.space.arch import DraftArch
from dreams_nas.targets.huggingface import HuggingFaceTarget

NUM_LEVELS = 4
ARCHS = {
    "plain": DraftArch(tap="last"),
    "deep": DraftArch(tap="0.5", depth=2, head_ratio=0.5),
    "half_kept": DraftArch(tap="last", depth=2, keep_ratio=0.5, vocab=0.5),
    "blind": DraftArch(tap="last", keep_ratio=0.0),
}


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return build_target("llava")


@pytest.fixture(scope="module")
def recordings(target: HuggingFaceTarget) -> list[Recording]:
    """Answers of different lengths behind prompts of different lengths."""
    return [
        record_answer(target, 7, num_images=1, seed=1),
        record_answer(target, 4, num_images=0, num_text=20, seed=2),
        record_answer(target, 9, num_images=2, num_text=9, seed=3),
        record_answer(target, 2, num_images=1, seed=4),
    ]


def weights_of(target: HuggingFaceTarget, arch: DraftArch) -> DraftWeights:
    return build_draft(target, arch, seed=5).weights(target.head_weight_VD)


def decode_path_logits(
    target: HuggingFaceTarget, weights: DraftWeights, arch: DraftArch, recording: Recording
) -> list[list[Tensor]]:
    """What decoding drafts at every root, token by token, from a cache."""
    taps = arch.sizes(target.spec.dims).target_layer_ids
    features_TF = recording.features(taps)
    embeddings_TD = target.embed(recording.tokens_T).clone()
    place = 0
    for start, stop in recording.image_spans:
        embeddings_TD[start:stop] = recording.image_embeddings_MD[place : place + stop - start]
        place += stop - start
    end = len(recording.tokens_T)
    rows = prompt_rows(recording, arch.keep_ratio).tolist()
    cache = DraftCache(weights, end + NUM_LEVELS)

    def run(position: int, token_at: int, state_11D: Tensor, source: Tensor) -> Tensor:
        cache.open(1)
        rotary = build_rotary(weights.inv_freq, torch.tensor([position]), features_TF.dtype)
        embedding = source[None, token_at : token_at + 1]
        return forward_rows(weights, embedding, state_11D, rotary, cache, None)

    found: list[list[Tensor]] = []
    for row in [*rows, *range(recording.prompt_length, end - 2)]:
        fused = fuse(weights, features_TF[None, row : row + 1])
        state = run(row, row + 1, fused, embeddings_TD)
        cache.commit()
        if row < recording.prompt_length - 1:
            continue
        found.append([head(weights, state)[0, 0]])
        for level in range(2, min(NUM_LEVELS, end - row - 2) + 1):
            token_at = row + level
            state = run(token_at - 1, token_at, state, target.embed(recording.tokens_T))
            found[-1].append(head(weights, state)[0, 0])
        cache.rewind()
    return found


@pytest.mark.parametrize("name", ARCHS)
def test_every_level_of_every_root_equals_the_decode_path(
    name: str, target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    arch = ARCHS[name]
    weights = weights_of(target, arch)
    taps = arch.sizes(target.spec.dims).target_layer_ids
    batch = build_batch(recordings, taps, arch.keep_ratio, target.embed, dtype=torch.float64)
    levels = [head(weights, s) for s in unroll(weights, batch.rows, target.embed, NUM_LEVELS)]
    num_roots = batch.next_tokens_BR.shape[1]
    num_compared = 0
    for sample, recording in enumerate(recordings):
        own_roots = recording.num_answer_tokens - 1
        wanted = decode_path_logits(target, weights, arch, recording)
        assert len(wanted) == own_roots
        for index, by_level in enumerate(wanted):
            for level, logits_V in enumerate(by_level):
                found = levels[level][sample, num_roots - own_roots + index]
                torch.testing.assert_close(found, logits_V, rtol=1e-9, atol=1e-9)
                num_compared += 1
    assert num_compared == 18 + 6 + 26 + 1


def test_features_at_or_after_the_root_change_no_drafted_logit(
    target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    arch = ARCHS["deep"]
    weights = weights_of(target, arch)
    taps = arch.sizes(target.spec.dims).target_layer_ids
    recording = recordings[0]
    batch = build_batch([recording], taps, 1.0, target.embed, dtype=torch.float64)
    before = list(unroll(weights, batch.rows, target.embed, NUM_LEVELS))
    num_rows, num_roots = batch.rows.features_BTF.shape[1], batch.next_tokens_BR.shape[1]
    root = 3  # its row holds the feature of the position before it
    row = num_rows - num_roots + root
    batch.rows.features_BTF[:, row + 1 :] += 10
    after = list(unroll(weights, batch.rows, target.embed, NUM_LEVELS))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, : root + 1], new[:, : root + 1])
        assert not torch.allclose(old[:, root + 1 :], new[:, root + 1 :])
    batch.rows.features_BTF[:, row] += 10
    moved = list(unroll(weights, batch.rows, target.embed, NUM_LEVELS))
    assert all(
        not torch.allclose(a[:, root], b[:, root]) for a, b in zip(after, moved, strict=True)
    )


def test_padding_and_neighbours_change_nothing(
    target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    arch = ARCHS["half_kept"]
    weights = weights_of(target, arch)
    together = build_batch(recordings, (1,), 0.5, target.embed, dtype=torch.float64)
    states = list(unroll(weights, together.rows, target.embed, 3))
    for sample, recording in enumerate(recordings):
        alone = build_batch([recording], (1,), 0.5, target.embed, dtype=torch.float64)
        own = alone.next_tokens_BR.shape[1]
        for one, all_ in zip(unroll(weights, alone.rows, target.embed, 3), states, strict=True):
            torch.testing.assert_close(one[0], all_[sample, -own:], rtol=1e-9, atol=1e-9)


def test_mask_shows_committed_rows_before_the_root_and_own_levels_only() -> None:
    mask = unroll_mask(torch.tensor([3, 5]), num_rows=5, num_roots=2, level=3)
    own = [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert mask[0, 0].int().tolist() == [[0, 0, 1, 1, 0, *own[0]], [0, 0, 1, 1, 1, *own[1]]]
    assert mask[1, 0].int().tolist() == [[1, 1, 1, 1, 0, *own[0]], [1, 1, 1, 1, 1, *own[1]]]
    empty = unroll_mask(torch.tensor([1]), num_rows=3, num_roots=3, level=1)
    assert empty.any(dim=-1).all()


def test_shift_left_moves_towards_earlier_roots() -> None:
    values = torch.tensor([[1, 2, 3]])
    assert shift_left(values, 0).tolist() == [[1, 2, 3]]
    assert shift_left(values, 2).tolist() == [[3, 0, 0]]
    assert shift_left(values, 5).tolist() == [[0, 0, 0]]
