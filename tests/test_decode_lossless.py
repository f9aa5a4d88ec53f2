"""Speculative output equals plain decoding, whatever the tree, the draft and the prompt."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from draft_models import TREES, build_loud_target, build_ready
from target_models import FAMILIES, IMAGE_FAMILIES, build_prompt, build_target
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.decode import rounds
from dreams_nas.decode.accept import accept_greedy
from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.engine import build_plan, decode
from dreams_nas.decode.reference import reference_rounds
from dreams_nas.draft.layers import Rotary
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree

ARCHS = {
    "last": DraftArch(tap="last", depth=1, head_ratio=0.5, ffn_ratio=0.5, vocab=1.0),
    "half_kept": DraftArch(tap="0.5", depth=1, keep_ratio=0.25, vocab=0.125),
    "deep": DraftArch(tap="last", depth=2, keep_ratio=0.0, vocab=0.5),
}
NUM_NEW = 24


@pytest.mark.parametrize("num_images", [0, 1, 2])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tree", TREES)
def test_every_tree_and_draft_decodes_as_plain_does(tree: str, arch: str, num_images: int) -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, num_images)
    plain = decode(target, inputs, max_new_tokens=NUM_NEW)
    plan = build_plan(TREES[tree], target)
    fast = decode(
        target, inputs, max_new_tokens=NUM_NEW, draft=build_ready(target, ARCHS[arch]), plan=plan
    )
    assert fast.tokens == plain.tokens
    assert len(plain.rounds) == len(plain.tokens) - 1
    # The draft is right now and then, or the test would say nothing about committing a path.
    if tree == "bushy":
        assert len(fast.rounds) < len(plain.rounds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", TREES)
def test_every_family_decodes_as_plain_does(family: str, tree: str) -> None:
    target = build_loud_target(family, seed=1)
    draft = build_ready(target, ARCHS["last"])
    for num_images in (0, 1, 2) if family in IMAGE_FAMILIES else (0,):
        inputs = build_prompt(target, num_images, seed=num_images)
        plain = decode(target, inputs, max_new_tokens=NUM_NEW)
        fast = decode(
            target,
            inputs,
            max_new_tokens=NUM_NEW,
            draft=draft,
            plan=build_plan(TREES[tree], target),
        )
        assert fast.tokens == plain.tokens


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tree", ["chain", "bushy"])
def test_fast_path_drafts_and_accepts_what_the_readable_reference_does(
    tree: str, arch: str
) -> None:
    target = build_loud_target("llava", seed=2)
    draft = build_ready(target, ARCHS[arch], seed=3)
    inputs = build_prompt(target, 2, seed=4)
    answer, expected = reference_rounds(target, inputs, draft, TREES[tree], NUM_NEW)
    fast = decode(
        target, inputs, max_new_tokens=NUM_NEW, draft=draft, plan=build_plan(TREES[tree], target)
    )
    assert fast.tokens == answer
    rounds = [(r.drafted, r.num_accepted) for r in fast.rounds]
    assert rounds[:-1] == expected[:-1]
    # The last round may accept beyond the limit, where the reference has no answer to compare.
    assert rounds[-1][0] == expected[-1][0]
    assert rounds[-1][1] >= expected[-1][1]


def test_drafts_of_three_taps_decode_as_plain_does() -> None:
    target = build_loud_target("llava", num_layers=4)
    draft = build_ready(target, DraftArch(tap="three", depth=2, keep_ratio=0.25))
    inputs = build_prompt(target, 1)
    plain = decode(target, inputs, max_new_tokens=NUM_NEW)
    plan = build_plan(TREES["bushy"], target)
    assert decode(target, inputs, max_new_tokens=NUM_NEW, draft=draft, plan=plan).tokens == (
        plain.tokens
    )


@pytest.mark.parametrize("fault", ["depth", "mask", "row", "feature"])
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above would see a position, a mask or a committed row off by one."""
    target = build_loud_target("llava")
    inputs = build_prompt(target, 1)
    plain = decode(target, inputs, max_new_tokens=60)
    draft = build_ready(target, ARCHS["last"])
    plan = build_plan(TREES["bushy"], target)
    assert plan is not None
    assert plan.mask_QQ is not None
    sound = decode(target, inputs, max_new_tokens=60, draft=draft, plan=plan)
    if fault == "depth":
        plan = replace(plan, depths_Q=torch.cat([plan.depths_Q[:1] + 1, plan.depths_Q[1:]]))
    elif fault == "mask":
        plan = replace(plan, mask_QQ=plan.mask_QQ.roll(1, dims=0))
    elif fault == "row":

        def accept_neighbour(*arguments: Any) -> tuple[list[int], list[int]]:
            rows, tokens = accept_greedy(*arguments)
            return [r if r <= i else r - 1 for i, r in enumerate(rows)], tokens

        monkeypatch.setattr(rounds, "accept_greedy", accept_neighbour)
    else:
        monkeypatch.setattr(DraftSession, "sync", _sync_one_late)
    faulty = decode(target, inputs, max_new_tokens=60, draft=draft, plan=plan)
    assert sound.tokens == plain.tokens
    if fault == "feature":  # a wrong draft costs speed, never the answer
        assert faulty.tokens == plain.tokens
        assert [r.drafted for r in faulty.rounds] != [r.drafted for r in sound.rounds]
    else:
        assert faulty.tokens != plain.tokens


def _sync_one_late(self: DraftSession, tokens_A: Tensor, features_AF: Tensor) -> None:
    stop = self._position + len(tokens_A)
    rotary = self._rotary(self._position, stop)
    self._commit(self._target.embed(tokens_A), features_AF.roll(1, dims=1), rotary)
    self._position = stop


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("tree", ["chain", "bushy"])
def test_the_token_limit_is_kept_inside_a_block(tree: str, max_new_tokens: int) -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, 1)
    longer = decode(target, inputs, max_new_tokens=30).tokens
    plan = build_plan(TREES[tree], target)
    draft = build_ready(target, ARCHS["last"])
    fast = decode(target, inputs, max_new_tokens=max_new_tokens, draft=draft, plan=plan)
    assert fast.tokens == longer[:max_new_tokens]


@pytest.mark.parametrize("tree", ["chain", "bushy"])
def test_an_end_token_anywhere_in_a_block_ends_the_answer_there(tree: str) -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, 1)
    answer = decode(target, inputs, max_new_tokens=30).tokens
    draft = build_ready(target, ARCHS["last"])
    plan = build_plan(TREES[tree], target)
    seen = set()
    for position, token in enumerate(answer):
        if token in seen:
            continue
        seen.add(token)
        others = [t for t in range(97) if t not in answer][:2]
        for stops in ([token], [*others, token]):
            fast = decode(target, inputs, max_new_tokens=30, draft=draft, plan=plan, stop_ids=stops)
            assert fast.tokens == answer[: position + 1]
            assert fast.stopped
    assert len(seen) > 2


def test_prompts_beyond_the_targets_positions_are_refused() -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, 0)
    room = target.spec.max_positions - len(inputs.input_ids_T)
    with pytest.raises(UserError, match=rf"at most {room} new tokens"):
        decode(target, inputs, max_new_tokens=room + 1)
    with pytest.raises(UserError, match="0 or more"):
        decode(target, inputs, max_new_tokens=-1)


@pytest.mark.parametrize("arch", ["last", "deep"])
@pytest.mark.parametrize("tree", ["chain", "bushy", "deep"])
def test_the_last_positions_of_the_target_decode_as_plain_does(tree: str, arch: str) -> None:
    """Trees reach beyond the limit there, by more than one row of the draft's rotary table."""
    target = build_loud_target("llava", dtype=torch.float32)
    room = 12
    limit = target.spec.max_positions
    inputs = build_prompt(target, 1)
    extra = limit - room - len(inputs.input_ids_T)
    inputs = build_prompt(target, 1, num_text=12 + extra)
    assert len(inputs.input_ids_T) + room == limit
    shape = StaticTree.chain(9) if tree == "deep" else TREES[tree]
    draft = build_ready(target, ARCHS[arch], seed=3)
    assert len(draft.rotary.cos) == limit
    plain = decode(target, inputs, max_new_tokens=room, stop_ids=())
    fast = decode(
        target,
        inputs,
        max_new_tokens=room,
        draft=draft,
        plan=build_plan(shape, target),
        stop_ids=(),
    )
    assert fast.tokens == plain.tokens
    assert len(fast.tokens) == room


def test_rotary_beyond_the_table_continues_it() -> None:
    target = build_target("llama")
    draft = build_ready(target, ARCHS["last"])
    short = replace(draft, rotary=Rotary(draft.rotary.cos[:20], draft.rotary.sin[:20]))
    inputs = build_prompt(target)
    plan = build_plan(TREES["bushy"], target)
    whole, cut = (
        decode(target, inputs, max_new_tokens=30, draft=d, plan=plan) for d in (draft, short)
    )
    assert [r.drafted for r in cut.rounds] == [r.drafted for r in whole.rounds]


def test_lines_of_a_plan_lead_from_the_root_to_each_row() -> None:
    target = build_target("llama")
    plan = build_plan(TREES["bushy"], target)
    assert plan is not None
    for row, line in enumerate(plan.lines):
        assert line[0] == 0
        assert line[-1] == row
        for parent, child in pairwise(line.tolist()):
            assert child in plan.children[parent]


def test_records_hold_the_features_of_every_committed_position() -> None:
    target = build_loud_target("llava")
    draft = build_ready(target, ARCHS["last"])
    inputs = build_prompt(target, 1)
    plan = build_plan(TREES["bushy"], target)
    result = decode(
        target, inputs, max_new_tokens=NUM_NEW, draft=draft, plan=plan, want_record=True
    )
    assert result.record is not None
    features = torch.cat([result.record.prefill.features_TF, *result.record.features])
    tokens = torch.cat([inputs.input_ids_T, torch.tensor(result.tokens[:-1])])
    cache = target.build_cache(len(tokens))
    whole = target.prefill(
        replace(inputs, input_ids_T=tokens), cache, target_layer_ids=draft.target_layer_ids
    )
    num_known = min(len(features), len(tokens))
    torch.testing.assert_close(features[:num_known], whole.features_TF[:num_known])


@pytest.mark.parametrize("accepted", [(0, 0), (2, 0, 1), (4, 4), (1, 3, 0, 4)])
@pytest.mark.parametrize("keep_ratio", [0.0, 1.0])
@torch.inference_mode()
def test_the_drafts_cache_equals_one_built_from_scratch(
    keep_ratio: float, accepted: tuple[int, ...]
) -> None:
    """After rounds that accept nothing, something and everything, in fp64."""
    target = build_target("llava")
    draft = build_ready(target, DraftArch(tap="last", depth=2, keep_ratio=keep_ratio))
    plan = build_plan(TREES["chain"], target)
    assert plan is not None
    inputs = build_prompt(target, 1)
    answer = torch.tensor(decode(target, inputs, max_new_tokens=30).tokens)
    whole_ids = torch.cat([inputs.input_ids_T, answer])
    cache = target.build_cache(len(whole_ids))
    taps = draft.target_layer_ids
    everything = target.prefill(
        replace(inputs, input_ids_T=whole_ids), cache, target_layer_ids=taps
    )
    length = len(inputs.input_ids_T)
    start = everything._replace(
        features_TF=everything.features_TF[:length],
        embeddings_TD=everything.embeddings_TD[:length],
    )
    session = DraftSession(draft, target, plan, len(whole_ids) + 1)
    session.prefill(start, answer[:1], inputs)
    done = 1
    for num_accepted in accepted:
        session.propose(plan)
        gained = slice(done, done + num_accepted + 1)
        features = everything.features_TF[length + done - 1 : length + done + num_accepted]
        session.sync(answer[gained], features)
        done += num_accepted + 1
    longer = replace(inputs, input_ids_T=whole_ids[: length + done - 1])
    fresh = DraftSession(draft, target, plan, len(whole_ids) + 1)
    fresh.prefill(
        everything._replace(
            features_TF=everything.features_TF[: length + done - 1],
            embeddings_TD=everything.embeddings_TD[: length + done - 1],
        ),
        answer[done - 1 : done],
        longer,
    )
    num_rows = session.cache.length
    assert num_rows == fresh.cache.length
    for ours, theirs in zip(session.cache.buffers, fresh.cache.buffers, strict=True):
        torch.testing.assert_close(ours[:, :, :num_rows], theirs[:, :, :num_rows])
    torch.testing.assert_close(session.propose(plan), fresh.propose(plan))
