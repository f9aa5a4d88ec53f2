"""Losslessness with a trained draft on the embedded target, in fp64; long, run by hand.

`DREAMS_NAS_TOKENS` sets how many tokens are compared; the published figure is 200,000. The draft is
that of the run in `DREAMS_NAS_RUN`, or of a demo that is run first.
"""

import os
from itertools import count
from pathlib import Path

import pytest
import torch

from dreams_nas.bench.calibrate import calibrate
from dreams_nas.bench.stage import build_prompts
from dreams_nas.decode.adaptive import AdaptivePlan
from dreams_nas.decode.costs import round_costs
from dreams_nas.decode.drafting import ready_draft
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.decode.engine import Plan, build_plan, decode
from dreams_nas.draft.model import load_draft
from dreams_nas.features.conversations import load_conversations
from dreams_nas.latency.table import load_table
from dreams_nas.pipeline.demo import demo_config
from dreams_nas.pipeline.run import run
from dreams_nas.space.policy import DynamicTree
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.loading import load_target

NUM_TOKENS = int(os.environ.get("DREAMS_NAS_TOKENS", "200000"))
TREE = DynamicTree(num_levels=5, width=4, num_nodes=16)


@pytest.mark.slow
def test_a_trained_draft_never_changes_a_token(tmp_path: Path) -> None:
    """Own tree, chain, dynamic and adaptive against plain decoding, prompts of the test split."""
    folder = Path(os.environ.get("DREAMS_NAS_RUN", tmp_path / "run"))
    if not (folder / "export").is_dir():
        run(demo_config("demo", out=str(folder)), quiet=True)
    target = load_target("embedded", "cpu", "float64")
    draft = load_draft(folder / "export", "cpu", torch.float64)
    assert draft.config.policy is not None
    table = load_table(folder / "table.json")
    choose = build_prompts(target, load_conversations("embedded:choose", 12, 0))
    fitted = calibrate(target, draft, TREE, choose, 96, quiet=True)
    costs = round_costs(table, draft.config, TREE, kv=150)
    plans: dict[str, Plan | None] = {
        "own": build_plan(draft.config.policy, target),
        "chain": build_plan(StaticTree.chain(4), target),
        "dynamic": DynamicPlan(TREE),
        "adaptive": AdaptivePlan(fitted, costs),
    }
    ready = ready_draft(draft, target)
    num_checked = num_rounds = 0
    for seed in count():
        for prompt in build_prompts(target, load_conversations("embedded:test", 40, seed)):
            plain = decode(target, prompt.inputs, max_new_tokens=128)
            for name, plan in plans.items():
                result = decode(target, prompt.inputs, max_new_tokens=128, draft=ready, plan=plan)
                assert result.tokens == plain.tokens, f"{prompt.id} of seed {seed}, {name}"
                num_checked += len(result.tokens)
                num_rounds += len(result.rounds)
            if num_checked >= NUM_TOKENS:
                print(f"{num_checked} tokens checked in {num_rounds} rounds")
                assert num_rounds < num_checked
                return
