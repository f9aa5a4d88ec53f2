"""The whole measurement on a tiny target: everything covered, and the blocks add up to rounds."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from target_models import build_target

from dreams_nas.core.config import load_config
from dreams_nas.core.errors import UserError
from dreams_nas.decode import drafting, engine, rounds
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.predict import predict_round_ms
from dreams_nas.latency.table import load_table, save_table
from dreams_nas.profiling import draft_blocks, validation
from dreams_nas.profiling import profile as profile_module
from dreams_nas.profiling.config import ProfileConfig
from dreams_nas.profiling.grids import likely_tree
from dreams_nas.profiling.profile import profile
from dreams_nas.profiling.threads import compare_threads
from dreams_nas.profiling.validation import Case, validate_table
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import Walk

SPACE = SearchSpace(
    tap=("last", "0.5"),
    depth=(1, 2),
    head_ratio=(0.5, 1.0),
    vocab=(0.5, 1.0),
    policy={"kind": "static_tree", "levels": [0, 4], "nodes": [1, 8]},
)
CONFIG = ProfileConfig(
    dtype="float32",
    threads=1,
    budget_s=1.0,
    max_kv=64,
    num_random_drafts=1,
    timer={"min_sweeps": 1, "max_sweeps": 1, "max_regates": 0},
)


class CountingClock:
    """Every block spends a known time; nothing else takes any."""

    def __init__(self) -> None:
        self.ms = 0.0

    def now(self) -> float:
        return self.ms / 1000.0


@pytest.fixture
def target():
    import torch

    return build_target("llava", dtype=torch.float32)


@pytest.fixture
def counted(target, monkeypatch):
    """A target and drafts whose passes cost what simple formulas say, on a fake clock."""
    clock = CountingClock()
    real = {
        "verify": target.verify,
        "embed": target.embed,
        "forward_rows": drafting.forward_rows,
        "fuse": drafting.fuse,
        "head": drafting.head,
    }

    def verify(tokens_Q, depths_Q, mask_QQ, cache, **options):
        clock.ms += 5 + 0.1 * len(tokens_Q) + 0.01 * cache.length
        return real["verify"](tokens_Q, depths_Q, mask_QQ, cache, **options)

    def embed(tokens):
        clock.ms += 0.02  # a seam: no block is timed for it alone
        return real["embed"](tokens)

    def forward_rows(weights, embeddings, features, rotary, kv, mask, **options):
        q = embeddings.shape[1]
        before = kv.length + kv.num_self_fed - q
        for index, layer in enumerate(weights.layers):
            width = len(layer.k) + len(layer.gate)
            is_last = index == len(weights.layers) - 1
            answered = (options.get("num_queries") or q) if is_last else q
            clock.ms += 0.3 + 0.2 * (index == 0) + 0.002 * before
            clock.ms += (0.01 + 0.001 * q) * len(layer.k) + (0.01 + 0.002 * answered) * width
        return real["forward_rows"](weights, embeddings, features, rotary, kv, mask, **options)

    def fuse(weights, features):
        clock.ms += 0.05 + 0.004 * len(features)
        return real["fuse"](weights, features)

    def head(weights, states):
        clock.ms += 0.001 * len(weights.head_VD) * (1 + 0.5 * len(states))
        return real["head"](weights, states)

    target.verify, target.embed = verify, embed
    for name, fake in (("forward_rows", forward_rows), ("fuse", fuse), ("head", head)):
        monkeypatch.setattr(drafting, name, fake)
        monkeypatch.setattr(draft_blocks, name, fake)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=clock.now))
    monkeypatch.setattr(profile_module, "warn_if_loaded", lambda: 0.0)
    return target, clock


def test_a_round_costs_the_sum_of_its_terms(counted, monkeypatch):
    target, clock = counted
    table = profile(target, SPACE, CONFIG, clock=clock, quiet=True)
    for kind in ("rounds", "first_rounds", "drafts"):
        report = table.validation[kind]
        assert report["table"]["mape"] < 1e-9, kind
        assert report["table"]["kendall_tau"] == 1
        assert report["judged_by"] == ["random"]
        assert report["table"] == report["by_group"]["random"]
        assert report["by_group"]["corner"]["mape"] < 1e-9, kind
        assert report["baselines"]["constant"]["mape"] > 0.01
        assert set(report["by_group"]) == {"corner", "random"}
    times = [case["measured_ms"] for case in table.validation["rounds"]["cases"]]
    assert max(times) > 1.3 * min(times)
    _check_that_an_unknown_cost_shows(target, clock, table, monkeypatch)


def _check_that_an_unknown_cost_shows(target, clock, table, monkeypatch):
    """A cost that no block knows is a bias of rounds, and none of drafts."""
    real = rounds.accept_greedy

    def slow_accept(*args):
        clock.ms += 3.0
        return real(*args)

    monkeypatch.setattr(rounds, "accept_greedy", slow_accept)
    cases = [Case("finalist", SPACE.largest(), likely_tree(4, 8), 20)]
    rng = np.random.default_rng(0)
    report = validate_table(table, target, cases, clock, rng, budget_s=0.1, min_visits=1)
    assert report["rounds"]["table"]["bias"] < -0.1
    assert report["drafts"]["table"]["mape"] < 1e-9
    assert set(report["rounds"]["by_group"]) == {"finalist"}


@pytest.mark.parametrize(
    ("budget_s", "min_visits", "num_visits"), [(0.0, 3, 1), (3.4, 1, 4), (3.4, 99, 5), (3.1, 4, 4)]
)
def test_validation_ends_soon_after_its_budget(monkeypatch, budget_s, min_visits, num_visits):
    """A visit takes one second; up to the least number a quarter more may be spent."""
    clock = CountingClock()
    times = validation.RoundTimes(None, np.array([1.0, 2.0]))

    def visit(*_):
        clock.ms += 1000.0
        return times

    monkeypatch.setattr(validation, "measure_rounds", visit)
    monkeypatch.setattr(validation, "predict_rounds", lambda *_: np.array([1.0, 2.0]))
    drafts = SimpleNamespace(tokens=lambda n: np.zeros(n), ready=lambda arch: None)
    cases = [Case("random", SPACE.largest(), StaticTree.chain(1), 20)]
    costs = {SPACE.largest(): None}
    rng = np.random.default_rng(0)
    found = validation._measure_rounds(
        None, drafts, cases, costs, clock, rng, 2, budget_s, min_visits
    )
    assert found[2] == num_visits


def test_a_tree_gathers_what_it_commits_and_a_chain_does_not(target, monkeypatch):
    blocks = profile_module._build_blocks(target, SPACE, CONFIG)
    committed = []
    monkeypatch.setattr(type(blocks.target.cache), "commit", lambda _, rows: committed.append(rows))
    is_gathered = {}
    for key, point in blocks.points.points.items():
        if key.startswith("host") and "part=commit" in key:
            point.prepare()
            point.run()
            is_gathered[key] = committed[-1] != list(range(len(committed[-1])))
    chains = [gathered for key, gathered in is_gathered.items() if "mask=chain" in key]
    trees = [gathered for key, gathered in is_gathered.items() if "mask=tree" in key]
    assert chains == [False, False, False]
    assert trees == [False, True, True]  # a tree of one node is a chain


@pytest.mark.parametrize("depth", [1, 2])
def test_syncs_ask_for_one_state_over_the_rows_that_are_told(target, monkeypatch, depth):
    blocks = profile_module._build_blocks(target, SPACE, CONFIG)
    seen = []

    def forward_rows(weights, embeddings, features, rotary, kv, mask, **options):
        before = kv.length + kv.num_self_fed - embeddings.shape[1]
        seen.append((len(weights.layers), embeddings.shape[1], before, options))
        return real(weights, embeddings, features, rotary, kv, mask, **options)

    real = drafting.forward_rows
    monkeypatch.setattr(drafting, "forward_rows", forward_rows)
    for key, point in blocks.points.points.items():
        if key.startswith(f"sync of draft(depth={depth},"):
            for _ in range(2):  # the second time as the first, two passes before each
                point.prepare()
                point.run()
    last = {"num_queries": 1}
    rows = blocks.grids.sync_rows
    expected = [(depth, q, kv, last) for q in rows for kv in (1, 64) for _ in range(2 * 3)]
    assert seen == expected * len(blocks.grids.layer_sizes)


@pytest.fixture(scope="module")
def table():
    import torch

    target = build_target("llava", dtype=torch.float32)
    config = CONFIG.replace(budget_s=0.2)
    return target, profile(target, SPACE, config, quiet=True)


def test_every_draft_and_policy_of_the_space_can_be_priced(table):
    target, found = table
    trees = [StaticTree.chain(k) for k in (1, 4)] + [likely_tree(4, n) for n in (2, 5, 8)]
    wide = StaticTree.from_paths([(0,), (1,), (2,), (3,), (0, 0), (1, 0), (2, 0), (3, 0)])
    walk = Walk(
        prompt_N=np.array([0, 0, 0]),
        root_N=np.array([0, 1, 6]),
        accepted_N=np.array([0, 4, 0]),
        answer_lengths_P=np.array([8]),
        prompt_lengths_P=np.array([57]),
        kept_rows_P=np.array([2]),
    )
    for arch, tree in itertools.product(SPACE.enumerate(target.spec.dims), [*trees, wide]):
        costs = CostModel(found, arch, target.spec.dims)
        assert costs.max_verify_rows() == 9
        assert costs.max_verify_rows("chain") == 5
        assert (predict_round_ms(costs, tree, walk) > 0).all()
        assert (costs.t_draft_prefill(np.array([1, 30, 64])) > 0).all()


def test_the_header_says_what_was_measured(table, tmp_path):
    target, found = table
    deployment = found.header.deployment
    assert (deployment.device, deployment.dtype, deployment.mode) == ("cpu", "float32", "eager")
    assert deployment.threads == 1
    assert found.header.shape_hash == target.spec.shape_hash
    found.require_match(deployment, target.spec.shape_hash, found.header.identity)
    assert len(found.sentinel.median_ms) > 2
    assert found.validation["one_thread"] is None
    save_table(found, tmp_path / "table.json")
    again = load_table(tmp_path / "table.json")
    assert again == found
    assert again.hash == found.replace(validation=None).hash


def test_another_dtype_or_mode_is_refused(target, tmp_path):
    with pytest.raises(UserError, match="dtype = bfloat16: the target is loaded in float32"):
        profile(target, SPACE, CONFIG.replace(dtype="bfloat16"))
    with pytest.raises(UserError, match="mode = graph: only eager passes can be measured"):
        load_config(ProfileConfig, flags={"mode": "graph"})


def test_several_threads_are_compared_with_one(target, monkeypatch, capsys):
    from dreams_nas.profiling import threads

    clock, set_to = CountingClock(), [2]
    monkeypatch.setattr(threads.torch, "set_num_threads", lambda n: set_to.append(n))
    real = target.verify

    def verify(*args, **options):
        clock.ms += 4.0 if set_to[-1] == 1 else 7.0
        return real(*args, **options)

    target.verify = verify
    points = profile_module._build_blocks(target, SPACE, CONFIG).points
    found = compare_threads(points, 2, clock)
    assert set_to[-1] == 2
    assert len(found["one"]) == len(found["all"]) == 3
    assert sum(found["one"].values()) == pytest.approx(8.0)
    assert sum(found["all"].values()) == pytest.approx(14.0)
    assert "one thread is faster here than 2 (8.00 against 14.00 ms" in capsys.readouterr().err
    assert compare_threads(points, 1, clock) is None


def test_real_time_goes_by_in_the_real_clock():
    from dreams_nas.profiling.timers import DeviceClock

    before = time.perf_counter()
    assert before <= DeviceClock("cpu").now() <= time.perf_counter()
