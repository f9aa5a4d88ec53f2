"""Trees grown every round: the same answers, the likeliest nodes, what costs decide."""

import math
from typing import Any

import pytest
import torch
from adaptive_rules import calibration, costs
from draft_models import build_loud_target, build_ready, draw_by_law
from target_models import FAMILIES, IMAGE_FAMILIES, build_prompt, build_tokenizer
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.decode.adaptive import AdaptivePlan, Economist
from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.dynamic import DynamicPlan, ancestry, grow
from dreams_nas.decode.engine import Plan, Round, decode
from dreams_nas.decode.reference import _run_draft
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.draft.layers import fuse, head
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.policy import DynamicTree

ARCH = DraftArch(tap="last", depth=1, keep_ratio=0.25, vocab=0.5)
NUM_NEW = 24
SHAPES = {
    "published": DynamicTree(num_levels=6, width=10, num_nodes=59),
    "small": DynamicTree(num_levels=4, width=2, num_nodes=7),
    "one_level": DynamicTree(num_levels=1, width=3, num_nodes=3),
    "chain": DynamicTree(num_levels=4, width=1, num_nodes=4),
}


PLANS: dict[str, Plan] = {
    **{name: DynamicPlan(tree) for name, tree in SHAPES.items()},
    "adaptive": AdaptivePlan(calibration(SHAPES["published"]), costs(0.3, 0.05)),
    "adaptive_chain": AdaptivePlan(calibration(SHAPES["chain"]), costs(0.1, 0.01)),
    "miser": AdaptivePlan(calibration(SHAPES["small"]), costs(9.0, 9.0)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", PLANS)
def test_every_grown_tree_decodes_as_plain_does(plan: str, family: str) -> None:
    target = build_loud_target(family, seed=1)
    draft = build_ready(target, ARCH)
    for num_images in (0, 1, 2) if family in IMAGE_FAMILIES else (0,):
        inputs = build_prompt(target, num_images, seed=num_images)
        plain = decode(target, inputs, max_new_tokens=NUM_NEW)
        fast = decode(target, inputs, max_new_tokens=NUM_NEW, draft=draft, plan=PLANS[plan])
        assert fast.tokens == plain.tokens


@pytest.mark.parametrize("plan", ["published", "adaptive"])
def test_grown_trees_save_rounds_and_say_what_they_were(plan: str) -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, 1)
    draft = build_ready(target, ARCH)
    plain = decode(target, inputs, max_new_tokens=NUM_NEW)
    fast = decode(target, inputs, max_new_tokens=NUM_NEW, draft=draft, plan=PLANS[plan])
    assert len(fast.rounds) < len(plain.rounds)
    position = 1
    for done in fast.rounds:
        assert done.parents is not None
        assert len(done.parents) == len(done.drafted)
        assert all(parent < node for node, parent in enumerate(done.parents))
        before = -1
        for node in done.path:
            assert done.parents[node] == before
            if position < len(plain.tokens):
                assert done.drafted[node] == plain.tokens[position]
            before, position = node, position + 1
        position += 1
    again = decode(target, inputs, max_new_tokens=NUM_NEW, draft=draft, plan=PLANS[plan])
    assert [r.drafted for r in again.rounds] == [r.drafted for r in fast.rounds]


@pytest.mark.parametrize("plan", ["published", "small", "adaptive"])
def test_sampling_and_penalties_do_not_depend_on_the_tree(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chooser, "draw", draw_by_law)
    target = build_loud_target("llava", seed=2)
    inputs = build_prompt(target, 1)
    settings = GenerationSettings(do_sample=True, temperature=0.8, repetition_penalty=1.3)
    shared: dict[str, Any] = {"max_new_tokens": NUM_NEW, "settings": settings, "stop_ids": ()}
    plain = decode(target, inputs, **shared)
    draft = build_ready(target, ARCH)
    assert decode(target, inputs, draft=draft, plan=PLANS[plan], **shared).tokens == plain.tokens
    drawn = settings.replace(acceptance="residual")
    with pytest.raises(UserError, match="needs a chain"):
        decode(target, inputs, draft=draft, plan=PLANS[plan], **{**shared, "settings": drawn})


def _first_round(plan: Plan, arch: DraftArch) -> tuple[Round, Any, Any, Tensor, Tensor]:
    """The first round of an answer, and what its draft had read: target, draft, rows."""
    target = build_loud_target("llama")
    draft = build_ready(target, arch)
    inputs = build_prompt(target)
    result = decode(target, inputs, max_new_tokens=3, draft=draft, plan=plan, stop_ids=())
    cache = target.build_cache(64)
    with torch.inference_mode():
        prefill = target.prefill(inputs, cache, target_layer_ids=draft.target_layer_ids)
        token_1 = torch.tensor(result.tokens[:1])
        rows_x = torch.cat([prefill.embeddings_TD[1:], target.embed(token_1)])
        rows_f = fuse(draft.weights, prefill.features_TF)
    return result.rounds[0], target, draft, rows_x, rows_f


def _scored_paths(done: Round) -> dict[tuple[int, ...], float]:
    assert done.parents is not None
    assert done.scores is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(done.drafted, done.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, done.scores, strict=True))


@torch.inference_mode()
def test_the_first_tree_holds_the_likeliest_paths() -> None:
    """Against a draft that is run anew, without cache and mask, for every path."""
    tree = DynamicTree(num_levels=3, width=4, num_nodes=12)
    plan = DynamicPlan(tree, wants_scores=True)
    first, target, draft, rows_x, rows_f = _first_round(plan, DraftArch(tap="last", depth=1))
    expected = _likeliest(target, draft, tree, rows_x, rows_f)
    found = _scored_paths(first)
    assert set(found) == set(expected)
    for path, score in found.items():
        assert score == pytest.approx(expected[path], abs=1e-5)


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 1, 1, 1), (3, 2, 1, 2), (1, 2, 1, 1)])
@torch.inference_mode()
def test_a_tree_that_widens_and_narrows_sees_its_own_path_alone(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every path's score against a draft that is run anew for it."""

    def choose(self: Economist, first: int) -> list[int]:
        return list(range(first, len(self._likely)))[-widths[self._level - 1] :]

    monkeypatch.setattr(Economist, "_worth_a_step", choose)
    monkeypatch.setattr(Economist, "_most_worth", lambda _, line: (line, len(line), 0.0))
    monkeypatch.setattr("dreams_nas.decode.adaptive._NEGLIGIBLE", 0.0)
    tree = DynamicTree(num_levels=5, width=3, num_nodes=39)
    plan = AdaptivePlan(calibration(tree), costs(0.0, 0.0))
    first, target, draft, rows_x, rows_f = _first_round(plan, DraftArch(tap="last", depth=2))
    found = _scored_paths(first)
    assert max(map(len, found)) == 5
    for path, score in found.items():
        assert score == pytest.approx(_score(target, draft, path, rows_x, rows_f), abs=1e-5)


def _score(target: Any, draft: Any, path: tuple[int, ...], rows_x: Tensor, rows_f: Tensor) -> float:
    """Log-probability of a path without cache and mask."""
    score, state = 0.0, _run_draft(draft, rows_x, rows_f, torch.arange(len(rows_x)))
    for token in path:
        score += float(head(draft.weights, state).log_softmax(-1)[token])
        rows_x = torch.cat([rows_x, target.embed(torch.tensor([token]))])
        rows_f = torch.cat([rows_f, state[None]])
        state = _run_draft(draft, rows_x, rows_f, torch.arange(len(rows_x)))
    return score


def _likeliest(
    target: Any, draft: Any, tree: DynamicTree, rows_x: Tensor, rows_f: Tensor
) -> dict[tuple[int, ...], float]:
    """The best paths of all that the rule drafts, by score."""
    found: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(tree.num_levels):
        level: dict[tuple[int, ...], float] = {}
        for path, score in frontier.items():
            x, f = rows_x, rows_f
            state = _run_draft(draft, x, f, torch.arange(len(x)))
            for token in path:
                x = torch.cat([x, target.embed(torch.tensor([token]))])
                f = torch.cat([f, state[None]])
                state = _run_draft(draft, x, f, torch.arange(len(x)))
            best = head(draft.weights, state).log_softmax(-1).topk(tree.width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*path, token)] = score + value
        found |= level
        ranked = sorted(level, key=level.__getitem__, reverse=True)[: tree.width]
        frontier = {path: level[path] for path in ranked}
    ranked = sorted(found, key=found.__getitem__, reverse=True)[: tree.num_nodes]
    return {path: found[path] for path in ranked}


@pytest.mark.parametrize("plan", ["small", "adaptive"])
def test_answers_end_inside_a_block_where_they_should(plan: str) -> None:
    """At an end token, a stop string and the limit, and next to the target's last position."""
    target = build_loud_target("llava", dtype=torch.float32)
    target.tokenizer = build_tokenizer()
    draft = build_ready(target, ARCH)
    inputs = build_prompt(target, 1)
    answer = decode(target, inputs, max_new_tokens=20, stop_ids=()).tokens
    shared: dict[str, Any] = {"draft": draft, "plan": PLANS[plan]}
    for limit in range(8):
        found = decode(target, inputs, max_new_tokens=limit, stop_ids=(), **shared)
        assert found.tokens == answer[:limit]
    for position, token in enumerate(answer):
        if token in answer[:position]:
            continue
        found = decode(target, inputs, max_new_tokens=20, stop_ids=[token], **shared)
        assert found.tokens == answer[: position + 1]
        settings = GenerationSettings(stop_strings=(target.decode_text([token]),))
        found = decode(target, inputs, max_new_tokens=20, stop_ids=(), settings=settings, **shared)
        assert found.tokens == answer[: position + 1]
        assert found.stopped
    room = target.spec.max_positions - len(inputs.input_ids_T)
    last = build_prompt(target, 1, num_text=12 + room - 9)
    plain = decode(target, last, max_new_tokens=9, stop_ids=())
    assert decode(target, last, max_new_tokens=9, stop_ids=(), **shared).tokens == plain.tokens


def test_ancestry_follows_parents() -> None:
    seen = ancestry(torch.tensor([0, 0, 1, 3]), num_levels=3).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


class ScriptedDraft:
    """Every row of a level guesses with these probabilities."""

    def __init__(self, levels: list[list[float]]) -> None:
        self._levels = levels
        self._depth, self._num_rows = 0, 1

    def open_round(self) -> None:
        self._depth, self._num_rows = 0, 1

    def guess_likely(self, num_guesses: int) -> tuple[Tensor, Tensor]:
        likely = torch.tensor(self._levels[self._depth][:num_guesses]).log()
        return (
            torch.arange(len(likely)).expand(self._num_rows, -1),
            likely.expand(self._num_rows, -1),
        )

    def feed(self, tokens_W: Tensor, rows_W: Tensor, mask_WR: Tensor) -> None:
        self._depth, self._num_rows = self._depth + 1, len(tokens_W)

    def close_round(self) -> None:
        pass


@pytest.mark.parametrize("certain", [0.0, -1e-12])
def test_a_kept_node_never_lacks_its_parent(certain: float) -> None:
    """Even where a draft is so sure that parent and child score the same."""
    tree = DynamicTree(num_levels=4, width=2, num_nodes=4)
    draft: Any = ScriptedDraft([[math.exp(certain), 1e-13]] * 4)
    grown = grow(draft, tree)
    assert (grown.parents_N <= torch.arange(4)).all()
    assert grown.depths_Q.tolist() == [0, 1, 2, 3, 4]
    depth = dict(enumerate(grown.depths_Q.tolist()))
    for node, parent in enumerate(grown.parents_N.tolist(), 1):
        assert depth[node] == depth[parent] + 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_levels": 2, "width": 2, "num_nodes": 7}, "draft only 6 nodes"),
        ({"num_levels": 0, "width": 2, "num_nodes": 1}, "greater than or equal to 1"),
    ],
)
def test_impossible_dynamic_trees_are_refused(values: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DynamicTree(**values)
