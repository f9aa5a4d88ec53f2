"""Losslessness over everything that can be combined, in fp64: no token may differ.

Every test adds to a count that the last one checks, so that a shrunk matrix is noticed.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from draft_models import TREES, build_loud_target, build_ready
from target_models import build_prompt

from dreams_nas.decode.adaptive import AdaptivePlan
from dreams_nas.decode.costs import RoundCosts
from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.decode.engine import Plan, build_plan, decode
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.policy import Calibration, DynamicTree, LevelCalibration
from dreams_nas.targets.huggingface import HuggingFaceTarget

TAPS = ("last", "0.5", "three")
KEEPS = (0.0, 0.25, 1.0)
VOCABULARIES = (1.0, 0.5, 0.125)
NUM_NEW = 20
MIN_TOKENS = 5000
checked: list[int] = []


@cache
def _target(num_layers: int) -> HuggingFaceTarget:
    return build_loud_target("llava", num_layers=num_layers, seed=5)


@cache
def _plain(num_layers: int, num_images: int) -> tuple[int, ...]:
    target = _target(num_layers)
    inputs = build_prompt(target, num_images, seed=num_images)
    return tuple(decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=()).tokens)


def _adaptive() -> Plan:
    """A rule whose decisions change from round to round."""
    level = LevelCalibration(
        log_probabilities=(-6.0, -2.0, 0.0), acceptance=(0.05, 0.4, 0.9), continuation=0.5
    )
    tree = DynamicTree(num_levels=5, width=4, num_nodes=20)
    rows_ms = 3 + 0.25 * np.arange(32, dtype=np.float64)
    costs = RoundCosts(
        sync_ms=0.2,
        step_ms=np.full(8, 0.4),
        decide_ms=0.01,
        chain_ms=rows_ms,
        tree_ms=rows_ms + 0.1,
    )
    fitted = Calibration(tree=tree, levels=(level,), error=0.0, num_rounds=1, tokens_per_round=2)
    return AdaptivePlan(fitted, costs)


POLICIES: dict[str, Callable[[HuggingFaceTarget], Plan | None]] = {
    "chain": lambda target: build_plan(TREES["chain"], target),
    "bushy": lambda target: build_plan(TREES["bushy"], target),
    "dynamic": lambda _: DynamicPlan(DynamicTree(num_levels=4, width=3, num_nodes=12)),
    "adaptive": lambda _: _adaptive(),
}


def compare(tap: str, policy: str) -> int:
    """Decode with a policy through a part of the matrix; returns the tokens compared."""
    num_layers, num_tokens = 4 if tap == "three" else 2, 0
    target = _target(num_layers)
    plan = POLICIES[policy](target)
    for keep_ratio, vocab in product(KEEPS, VOCABULARIES):
        arch = DraftArch(tap=tap, keep_ratio=keep_ratio, vocab=vocab)
        draft = build_ready(target, arch)
        for num_images in range(3):
            inputs = build_prompt(target, num_images, seed=num_images)
            result = decode(
                target, inputs, max_new_tokens=NUM_NEW, draft=draft, plan=plan, stop_ids=()
            )
            assert tuple(result.tokens) == _plain(num_layers, num_images), arch
            num_tokens += len(result.tokens)
    return num_tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tap", TAPS)
def test_no_token_differs(tap: str, policy: str) -> None:
    checked.append(compare(tap, policy))


def test_the_matrix_is_as_large_as_it_says() -> None:
    if len(checked) < len(TAPS) * len(POLICIES):
        pytest.skip("only a part of the matrix ran")
    print(f"{sum(checked)} tokens checked")
    assert sum(checked) >= MIN_TOKENS


@pytest.mark.parametrize("num_rounds", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_does_not_grow_with_rounds(policy: str, num_rounds: int) -> None:
    """The bytes of all live tensors, counted before and after."""
    target = _target(2)
    draft, plan = build_ready(target, DraftArch(tap="last")), POLICIES[policy](target)
    inputs = build_prompt(target, 1)

    def run(at_least: int) -> None:
        done = 0
        while done < at_least:
            result = decode(target, inputs, max_new_tokens=400, draft=draft, plan=plan, stop_ids=())
            done += len(result.rounds)

    run(60)
    before = _live_bytes()
    run(num_rounds)
    assert _live_bytes() <= before


def _live_bytes() -> int:
    import gc

    gc.collect()
    tensors = {t.data_ptr(): t for t in gc.get_objects() if type(t) is torch.Tensor}
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


def test_cache_bytes_are_what_arithmetic_says() -> None:
    target = _target(2)
    dims = target.spec.dims
    cache = target.build_cache(77)
    per_row = 2 * dims.num_layers * dims.num_kv_heads * dims.head_size * 8
    assert cache.num_bytes == 77 * per_row
    draft = build_ready(target, DraftArch(tap="last", depth=2))
    plan = DynamicPlan(DynamicTree(num_levels=3, width=4, num_nodes=9))
    session = DraftSession(draft, target, plan, 50)
    row = 2 * 2 * dims.num_kv_heads * dims.head_size * 8
    assert session.cache.num_bytes == (50 + 2 * 4) * row
