"""Passes of fixed shape: the same tokens as the eager ones, nothing that breaks a graph."""

from typing import Any

import pytest
import torch
from draft_models import TREES, build_loud_target, build_ready
from target_models import build_prompt
from test_decode_matrix import POLICIES

from dreams_nas.bench.oracle import OracleDraft
from dreams_nas.core.errors import UserError
from dreams_nas.decode.choose import seeded
from dreams_nas.decode.engine import build_plan, decode
from dreams_nas.decode.graphs import Captured
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.decode.static import StaticDraft, StaticTarget
from dreams_nas.draft.layers import head
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree

ARCH = DraftArch(tap="last", depth=2, keep_ratio=0.25, vocab=0.5)
CAPACITY = 120
NUM_NEW = 24


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llama"])
@pytest.mark.parametrize("policy", ["chain", "bushy", "dynamic", "adaptive"])
def test_fixed_shapes_draft_and_accept_the_same(policy: str, family: str) -> None:
    """Twice with one StaticTarget, so that nothing of one sequence is left for the next."""
    target = build_loud_target(family, seed=1)
    draft = build_ready(target, ARCH)
    plan = POLICIES[policy](target)
    assert plan is not None
    static = StaticTarget(target, CAPACITY)
    static_draft = StaticDraft(draft, target, plan, CAPACITY)
    for seed in (0, 1):
        inputs = build_prompt(target, 0 if family == "llama" else 1, seed=seed)
        shared: dict[str, Any] = {"max_new_tokens": NUM_NEW, "plan": plan}
        eager = decode(target, inputs, draft=draft, **shared)
        fixed = decode(static, inputs, draft=static_draft, **shared)
        assert fixed.tokens == eager.tokens
        assert [r.drafted for r in fixed.rounds] == [r.drafted for r in eager.rounds]
        assert sum(r.num_accepted for r in fixed.rounds) > 0
        drawn = GenerationSettings(do_sample=True, temperature=0.8, repetition_penalty=1.3)
        shared |= {"settings": drawn}
        one, other = (
            decode(on, inputs, draft=drafter, generator=seeded(3, target.device), **shared)
            for on, drafter in ((static, static_draft), (target, draft))
        )
        assert one.tokens == other.tokens
        plain = decode(static, inputs, max_new_tokens=NUM_NEW)
        assert plain.tokens == eager.tokens
    layers = target.decoder.layers
    assert max(len(layer._forward_hooks) for layer in layers) == 1
    static.close()
    assert not any(layer._forward_hooks for layer in layers)


def test_what_fixed_shapes_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="sliding window"):
        StaticTarget(build_loud_target("gemma3"), CAPACITY)
    target = build_loud_target("llama")
    draft, inputs = build_ready(target, ARCH), build_prompt(target)
    static = StaticTarget(target, 20)
    with pytest.raises(UserError, match="a larger capacity"):
        decode(static, inputs, max_new_tokens=NUM_NEW)
    plan = build_plan(TREES["chain"], target)
    bushy = build_plan(TREES["bushy"], target)
    assert plan is not None
    static_draft = StaticDraft(draft, target, plan, CAPACITY)
    cache, rows_Q = static.build_cache(20), torch.arange(21)
    mask_QQ = torch.zeros(21, 21, dtype=target.dtype)
    with pytest.raises(AssertionError, match="21 rows in a cache of 20"):
        static.verify(rows_Q, rows_Q, mask_QQ, cache)
    with pytest.raises(UserError, match="built for"):
        decode(target, inputs, max_new_tokens=NUM_NEW, draft=static_draft, plan=bushy)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_draft_and_verify_steps_compile_without_graph_breaks(num_rows: int) -> None:
    target = build_loud_target("llava", dtype=torch.float32)
    draft, inputs = build_ready(target, ARCH), build_prompt(target, 1)
    static = StaticTarget(target, CAPACITY)
    plan = build_plan(StaticTree.chain(6), target)
    assert plan is not None
    drafter = StaticDraft(draft, target, plan, CAPACITY)
    decode(static, inputs, max_new_tokens=8, draft=drafter, plan=plan)
    tokens = torch.arange(num_rows) + 5
    mask = torch.full((num_rows, num_rows), torch.finfo(torch.float32).min).triu_(1)
    states = torch.randn(num_rows, target.spec.dims.hidden)
    features = torch.randn(num_rows, len(draft.target_layer_ids) * target.spec.dims.hidden)
    session = drafter.open_session(target, plan, 60)
    assert hasattr(session, "step_pass")
    passes: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        "verify": (
            static.verify_pass(draft.target_layer_ids),
            (tokens, torch.arange(num_rows), mask),
        ),
        "step": (session.step_pass, (tokens, states, mask)),
        "sync": (session.sync_pass, (tokens, features)),
        "head": (lambda x: (head(draft.weights, x),), (states,)),
    }
    for name, (function, arguments) in passes.items():
        torch._dynamo.reset()
        with torch.inference_mode():
            expected = function(*arguments)
            found = torch._dynamo.explain(function)(*arguments)
            assert found.graph_break_count == 0, f"{name}: {found.break_reasons}"
            assert found.graph_count == 1
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            for one, other in zip(compiled(*arguments), expected, strict=True):
                torch.testing.assert_close(one, other)


def test_a_captured_pass_reads_what_it_is_given() -> None:
    held = torch.zeros(3)
    captured = Captured(lambda x: (x + held,), (torch.ones(3),))
    held.fill_(2)
    assert captured(torch.full((3,), 5.0))[0].tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="zip"):
        captured()


@pytest.mark.parametrize("name", TREES)
def test_an_oracle_is_accepted_to_the_full_depth(name: str) -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, 1)
    plain = decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=()).tokens
    tree = TREES[name]
    found = decode(
        target,
        inputs,
        max_new_tokens=NUM_NEW,
        stop_ids=(),
        draft=OracleDraft(plain, target.spec.dims.vocab),
        plan=build_plan(tree, target),
    )
    assert found.tokens == plain
    deepest = next(n for n in range(9, 0, -1) if (0,) * n in tree.paths)
    assert len(found.rounds) == -(-(NUM_NEW - 1) // (deepest + 1))
