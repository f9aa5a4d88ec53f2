"""Batched replay: ranks equal a sort, batches change nothing, walks equal the decode engine."""

import numpy as np
import pytest
import torch
from draft_models import TREES, build_draft, build_loud_target, build_ready
from recordings import made_up_recording, record_answer
from target_models import VOCAB, build_prompt

from dreams_nas.core.errors import UserError
from dreams_nas.decode.drafting import ready_draft
from dreams_nas.decode.engine import build_plan, decode
from dreams_nas.draft.layers import head
from dreams_nas.draft.unroll import unroll
from dreams_nas.features.recording import Recording
from dreams_nas.replay.batched import count_above, index_in_order, record_rank_paths
from dreams_nas.replay.batches import build_batch
from dreams_nas.replay.lockstep import lockstep_walk, replay_lockstep
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.rank_paths import RankPaths
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import walk
from dreams_nas.targets.huggingface import HuggingFaceTarget

NUM_LEVELS = 4
SIZES = (12, 24, 97)
ARCH = DraftArch(tap="last", depth=2, keep_ratio=0.5)


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return build_loud_target("llava")


@pytest.fixture(scope="module")
def recordings(target: HuggingFaceTarget) -> list[Recording]:
    lengths = [24, 3, 17, 1, 24, 9]
    return [record_answer(target, n, num_images=s % 3, seed=s) for s, n in enumerate(lengths)]


def order_of(target: HuggingFaceTarget) -> torch.Tensor:
    """Any order that is not the target's own."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))


def replay(
    target: HuggingFaceTarget, recordings: list[Recording], **options: int
) -> dict[int, RankPaths]:
    order = order_of(target)
    weights = build_draft(target, ARCH, seed=5).weights(target.head_weight_VD)
    return record_rank_paths(
        weights._replace(head_VD=target.head_weight_VD[order]),
        recordings,
        target.embed,
        target_layer_ids=(1,),
        keep_ratio=ARCH.keep_ratio,
        vocab_order=order,
        num_vocabs=SIZES,
        num_levels=NUM_LEVELS,
        **options,
    )


def test_ranks_equal_a_stable_sort_of_the_drafted_logits(
    target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    found = replay(target, recordings)
    order = order_of(target)
    weights = build_draft(target, ARCH, seed=5).weights(target.head_weight_VD)
    weights = weights._replace(head_VD=target.head_weight_VD[order])
    num_inside = dict.fromkeys(SIZES, 0)
    for prompt, recording in enumerate(recordings):
        num_roots = recording.num_answer_tokens - 1
        for size in SIZES:
            own = found[size].subset([prompt]).ranks_RL
            assert own.shape == (num_roots, NUM_LEVELS)
        if num_roots == 0:
            continue
        batch = build_batch([recording], (1,), 0.5, target.embed, dtype=torch.float64)
        answer = recording.tokens_T[recording.prompt_length :].tolist()
        for level, states in enumerate(unroll(weights, batch.rows, target.embed, NUM_LEVELS), 1):
            logits_RV = head(weights, states)[0]
            for size in SIZES:
                ranks_R = found[size].subset([prompt]).ranks_RL[:, level - 1]
                for root in range(num_roots):
                    place = root + level
                    kept = order[:size].tolist()
                    if place >= len(answer) or answer[place] not in kept:
                        assert ranks_R[root] == -1
                        continue
                    ids = logits_RV[root, :size].argsort(descending=True, stable=True).tolist()
                    assert ranks_R[root] == ids.index(kept.index(answer[place]))
                    num_inside[size] += 1
    assert 0 < num_inside[12] < num_inside[24] < num_inside[97]


def test_prompts_keep_their_sizes_ids_and_order(
    target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    paths = replay(target, recordings, batch_tokens=60)[24]
    assert paths.ids == tuple(r.id for r in recordings)
    assert paths.answer_lengths_P.tolist() == [24, 3, 17, 1, 24, 9]
    assert paths.prompt_lengths_P.tolist() == [r.prompt_length for r in recordings]
    dropped = [sum((stop - start) // 2 for start, stop in r.image_spans) for r in recordings]
    assert (paths.prompt_lengths_P - paths.kept_rows_P).tolist() == dropped
    assert paths.num_vocab == 24


def test_batch_composition_does_not_change_a_samples_ranks(
    target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    together = replay(target, recordings, batch_tokens=10_000)
    alone = replay(target, recordings, batch_tokens=1)
    backwards = replay(target, recordings[::-1])
    for size in SIZES:
        assert np.array_equal(together[size].ranks_RL, alone[size].ranks_RL)
        turned = backwards[size].subset(range(len(recordings))[::-1])
        assert np.array_equal(together[size].ranks_RL, turned.ranks_RL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_count_for_the_lower_index(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0]] * 4, dtype=dtype)
    ranks = count_above(logits, torch.tensor([1, 3, 5, 4]), (2, 4, 6))
    assert ranks.tolist() == [[0, 0, 0], [-1, 1, 1], [-1, -1, 2], [-1, -1, 4]]


def test_counts_are_exact_in_half_precision() -> None:
    logits = torch.arange(4096.0).flip(0)[None].div(4096).bfloat16()
    row = 3000
    wanted = int((logits[0] > logits[0, row]).sum() + (logits[0, :row] == logits[0, row]).sum())
    assert count_above(logits, torch.tensor([row]), (4096,)).tolist() == [[wanted]]


def test_ids_outside_a_partial_order_are_outside_every_prefix() -> None:
    assert index_in_order(torch.tensor([4, 0])).tolist() == [1, 5, 5, 5, 0]
    recording = made_up_recording([9, 4, 9, 0], prompt=[1, 2, 3], hidden=32, layer_ids=(1,))
    target = build_loud_target("llama")
    weights = build_draft(target, DraftArch(tap="last")).weights(target.head_weight_VD)
    paths = record_rank_paths(
        weights._replace(head_VD=target.head_weight_VD[[4, 0]]),
        [recording],
        target.embed,
        target_layer_ids=(1,),
        keep_ratio=1.0,
        vocab_order=torch.tensor([4, 0]),
        num_vocabs=(2,),
        num_levels=2,
    )[2]
    assert (paths.ranks_RL >= 0).tolist() == [[True, False], [False, True], [True, False]]


def test_impossible_sizes_are_refused(
    target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    weights = build_draft(target, ARCH).weights(target.head_weight_VD)
    options = {
        "target_layer_ids": (1,),
        "keep_ratio": 1.0,
        "vocab_order": torch.arange(VOCAB),
        "num_levels": 2,
    }
    with pytest.raises(UserError, match=r"\[98\] must lie in 1\.\.97"):
        record_rank_paths(weights, recordings, target.embed, num_vocabs=(98,), **options)
    with pytest.raises(UserError, match="at least one recorded answer"):
        record_rank_paths(weights, [], target.embed, num_vocabs=(9,), **options)


@pytest.mark.parametrize("tree", TREES)
def test_walk_over_rank_paths_equals_the_engine_over_recordings(
    tree: str, target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    draft = build_draft(target, ARCH.replace(vocab=0.25), seed=5)
    ready = ready_draft(draft, target)
    paths = record_rank_paths(
        ready.weights,
        recordings,
        target.embed,
        target_layer_ids=(1,),
        keep_ratio=0.5,
        vocab_order=draft.vocab_ids_W,
        num_vocabs=(len(draft.vocab_ids_W),),
        num_levels=NUM_LEVELS,
    )[len(draft.vocab_ids_W)]
    fast, oracle = walk(paths, TREES[tree]), lockstep_walk(target, ready, TREES[tree], recordings)
    for name in ("prompt_N", "root_N", "accepted_N", "kept_rows_P", "prompt_lengths_P", "tokens_N"):
        assert np.array_equal(getattr(fast, name), getattr(oracle, name)), name
    assert fast.acceptance_length == oracle.acceptance_length
    if tree == "bushy":
        assert fast.acceptance_length is not None
        assert fast.acceptance_length > 1.05


@pytest.mark.parametrize("num_images", [0, 1, 2])
@pytest.mark.parametrize("name", ["bushy", "chain"])
def test_replay_equals_decoding_round_for_round(
    name: str, num_images: int, target: HuggingFaceTarget
) -> None:
    tree: StaticTree = TREES[name]
    draft = build_ready(target, ARCH, seed=3)
    inputs = build_prompt(target, num_images, seed=9)
    live = decode(
        target,
        inputs,
        max_new_tokens=24,
        draft=draft,
        plan=build_plan(tree, target),
        stop_ids=(),
    )
    recording = record_answer(target, 24, num_images=num_images, seed=9)
    again = replay_lockstep(target, draft, tree, recording)
    assert again.tokens == live.tokens
    assert [r.drafted for r in again.rounds] == [r.drafted for r in live.rounds]
    accepted = [r.num_accepted for r in live.rounds]
    # Only the live target goes on behind the limit; the recording ends there.
    assert [r.num_accepted for r in again.rounds[:-1]] == accepted[:-1]
    assert again.rounds[-1].num_accepted == min(
        accepted[-1], 23 - sum(a + 1 for a in accepted[:-1])
    )
