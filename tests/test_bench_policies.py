"""Calibration, further policies of the winner, transformers' own arms, shares of a round."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import fake_tables
import numpy as np
import pytest
import torch
from bench_cases import ARCH, build_arms, build_prompts, space_of, with_policy
from draft_models import TREES, build_config, build_draft, build_loud_target
from target_models import build_prompt, build_tokenizer

from dreams_nas.bench.arms import PLAIN, Arm, decode_arm, parse_drafts, ready_arm
from dreams_nas.bench.calibrate import by_level, calibrate, calibration_error, fit, gather, isotonic
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.measure import run_bench
from dreams_nas.bench.policies import policy_arms
from dreams_nas.bench.references import REFERENCE_NAMES, decode_reference
from dreams_nas.bench.stage import bench_arms
from dreams_nas.bench.summary import summary_line
from dreams_nas.cli.app import main
from dreams_nas.core.device import identify_device
from dreams_nas.core.errors import UserError
from dreams_nas.decode.costs import round_costs
from dreams_nas.decode.engine import DecodeResult, Round, decode
from dreams_nas.decode.parts import PART_NAMES
from dreams_nas.draft.model import load_draft
from dreams_nas.latency.table import load_table, save_table
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.policy import Calibration, DynamicTree
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.deployment import target_deployment
from dreams_nas.targets.loading import load_target

TREE = DynamicTree(num_levels=3, width=3, num_nodes=9)


@pytest.mark.parametrize("name", REFERENCE_NAMES)
@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_transformers_writes_what_plain_decoding_writes(name: str, num_images: int) -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, num_images)
    plain = decode(target, inputs, max_new_tokens=20)
    theirs = decode_reference(target, name, inputs, 20)
    assert theirs.tokens == plain.tokens
    gained = sum(done.num_accepted + 1 for done in theirs.rounds)
    assert gained <= len(theirs.tokens) - 1
    if name == "generate":
        assert gained == len(theirs.tokens) - 1
    assert theirs.prefill_s > 0
    assert theirs.decode_s > 0


def test_isotonic_pools_what_falls() -> None:
    scores = np.linspace(-3, 0, 240)
    rising = (np.arange(240) % 10 < np.arange(240) // 24).astype(float)
    knots, acceptance = isotonic(scores, rising)
    assert (np.diff(knots) > 0).all()
    assert (np.diff(acceptance) >= 0).all()
    assert acceptance[0] < 0.1 < 0.8 < acceptance[-1]
    _, falling = isotonic(scores, 1 - rising)
    assert falling == pytest.approx(np.full(len(falling), 1 - rising.mean()))


def _decoded(tokens: list[int], *rounds: Round) -> DecodeResult:
    return DecodeResult(tokens, list(rounds), prefill_s=0.1, decode_s=0.1, stopped=False)


def test_paths_are_sorted_by_level_and_fitted() -> None:
    """Round k stands at token k; what lies beyond the answer's end is left out."""
    first = Round((5, 6, 7), (), 0.1, (-1, -1, 0), (-0.1, -2.0, -0.3))
    miss = Round((8, 6, 7), (), 0.1, (-1, -1, 0), (-0.2, -2.5, -0.4))
    last = Round((9, 6, 7), (), 0.1, (-1, -1, 0), (-0.5, -2.7, -0.6))
    levels = by_level([_decoded([1, 5, 7, 9], first, miss, last)], 3)
    assert [level.scores for level in levels] == [
        [-0.1, -2.0, -0.2, -2.5, -0.5, -2.7],
        [-0.3, -0.4],
        [],
    ]
    assert [level.accepted for level in levels] == [
        [True, False, False, False, True, False],
        [True, False],
        [],
    ]
    assert levels[0].num_going_on == 1
    fitted = fit(levels)
    assert len(fitted) == 2
    assert fitted[0].continuation == 1.0  # of the last round nobody knows
    assert fitted[1].continuation == 0.0


def test_the_calibration_error_is_the_distance_to_the_frequency() -> None:
    results = [
        _decoded([0, 1 if i % 4 == 0 else 2], Round((1,), (), 0.1, (-1,), (-0.5,)))
        for i in range(40)
    ]  # a quarter is accepted
    levels = by_level(results, 1)
    level = fit(levels)[0].replace(acceptance=(0.75,), log_probabilities=(-0.5,))
    wrong = Calibration(
        tree=DynamicTree(num_levels=1, width=1, num_nodes=1),
        levels=(level,),
        error=0.0,
        num_rounds=1,
        tokens_per_round=1.25,
    )
    assert calibration_error(wrong, levels) == pytest.approx(0.5)


def test_calibration_looks_at_every_place_and_changes_no_token() -> None:
    target = build_loud_target("llava")
    draft, prompts = build_draft(target, ARCH), build_prompts(target, 2)
    results = gather(target, draft, TREE, prompts, 20, quiet=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == decode(target, prompt.inputs, max_new_tokens=20).tokens
        assert len(result.rounds) == len(result.tokens) - 1
        assert all(r.parents is not None and len(r.parents) == 9 for r in result.rounds)


def test_a_draft_is_calibrated_on_prompts() -> None:
    target = build_loud_target("llava")
    draft = build_draft(target, ARCH)
    prompts = build_prompts(target, 9)
    found = calibrate(target, draft, TREE, prompts, 30, quiet=True)
    assert found.tree == TREE
    assert 0 <= found.error < 0.5
    assert found.num_rounds > 20
    assert all(0 <= level.continuation <= 1 for level in found.levels)
    with pytest.raises(UserError, match="needs 3 prompts"):
        calibrate(target, draft, TREE, prompts[:2], 30, quiet=True)


def test_all_policies_and_references_are_arms_of_one_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = build_loud_target("llava")
    arms = build_arms(target)
    winner = arms[1]
    assert winner.draft is not None
    prompts = build_prompts(target, 4)
    calibration = calibrate(target, winner.draft, TREE, build_prompts(target, 6), 20, quiet=True)
    winner.draft.config = winner.draft.config.replace(calibration=calibration)
    monkeypatch.setattr(fake_tables, "DIMS", target.spec.dims)
    table = fake_tables.build_table(space_of(ARCH))
    arms += policy_arms(winner, ["chain", "dynamic", "adaptive"], table, kv=30)
    arms += [Arm(name, reference=name) for name in REFERENCE_NAMES]
    config = MeasureConfig(max_new_tokens=12, num_passes=1, num_warmup=0)
    report = bench_arms(target, arms, prompts, config, quiet=True)
    line = json.loads(json.dumps(summary_line(report)))
    assert line["mismatched_tokens"] == 0
    assert line["arms"]["winner_dynamic"]["policy"]["kind"] == "dynamic_tree"
    assert line["arms"]["winner_adaptive"]["policy"]["kind"] == "adaptive"
    assert line["arms"]["generate"]["acceptance_length"] is None
    assert line["plain_over_generate"]["median"] > 0
    assert line["adaptive_over_best_fixed"]["median"] > 0
    assert line["calibration_error"] == calibration.error
    assert 0.2 < line["verify_over_forward"]["median"] < 20
    assert set(line["shares"]) == {*PART_NAMES, "rest"}
    assert sum(line["shares"].values()) == pytest.approx(1.0)
    assert line["shares"]["verify"] > 0.05
    assert set(line["arms"]["eagle3"]["shares"]) == set(line["shares"])
    assert line["arms"]["plain"]["shares"] is None


@pytest.mark.parametrize(
    ("policies", "said"),
    [(["adaptive"], "dreams-nas calibrate"), (["dynamic"], None), ([], None)],
)
def test_policies_that_lack_something_are_refused(policies: list[Any], said: str | None) -> None:
    target = build_loud_target("llava")
    winner = Arm("winner", build_draft(target, ARCH), TREES["bushy"])
    if said is None:
        assert len(policy_arms(winner, policies, None, 30)) == len(policies)
        return
    with pytest.raises(UserError, match=said):
        policy_arms(winner, policies, None, 30)


def test_a_policy_that_is_the_winners_own_tree_is_no_further_arm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    winner = Arm("winner", build_draft(build_loud_target("llava"), ARCH), StaticTree.chain(3))
    arms = policy_arms(winner, ["chain", "dynamic"], None, 30)
    assert [arm.name for arm in arms] == ["winner_dynamic"]
    assert "policy 'chain' is the winner's own tree" in capsys.readouterr().err


def test_an_arm_of_transformers_is_timed_but_is_no_plain_arm() -> None:
    target = build_loud_target("llama")
    arms = [Arm("generate", reference="generate")]
    config = MeasureConfig(max_new_tokens=4, num_passes=1, num_warmup=0)
    with pytest.raises(UserError, match="one must be 'plain'"):
        run_bench(target, arms, build_prompts(target, 1), config, quiet=True)
    assert not ready_arm(arms[0], target).arm.is_speculative
    assert decode_arm(target, ready_arm(PLAIN, target), build_prompt(target), 4).tokens


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose answers a random draft sometimes foresees, the draft, prompts, a table."""
    folder = tmp_path_factory.mktemp("place")
    loud = build_loud_target("llama", dtype=torch.float32)
    loud.model.save_pretrained(folder / "target")
    build_tokenizer().save_pretrained(folder / "target")
    target = load_target(folder / "target", "cpu", threads=1)
    for name, tree in (("draft", "bushy"), ("raw", "chain"), ("silent", None)):
        policy = StaticTree() if tree is None else TREES[tree]
        with_policy(build_draft(target, ARCH), policy).save(folder / name)
    lines = [
        {"id": f"s{i}", "messages": [{"role": "user", "content": f"w{5 + i} w9 w{20 + i}"}]}
        for i in range(9)
    ]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "short.jsonl").write_text("\n".join(json.dumps(line) for line in lines[:2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_tables, "DIMS", target.spec.dims)
        table = fake_tables.build_table(space_of(ARCH), deployment=target_deployment(target))
    header = table.header.replace(
        identity=identify_device("cpu"), shape_hash=target.spec.shape_hash
    )
    save_table(table.replace(header=header), folder / "table.json")
    assert main(["calibrate", *_shared(folder), "--set", "max_new_tokens=40"]) == 0
    return folder


def _shared(place: Path) -> list[str]:
    data = ["--data", f"{place}/data.jsonl", "--draft", f"{place}/draft", "--num-prompts", "9"]
    return ["--target", f"{place}/target", "--device", "cpu", "--threads", "1", "--quiet", *data]


def test_calibrate_stores_its_map_and_leaves_the_weights(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (place / "draft" / "model.safetensors").read_bytes()
    assert main(["calibrate", *_shared(place), "--set", "max_new_tokens=40"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    stored = json.loads((place / "draft" / "config.json").read_text())["calibration"]
    assert stored["error"] == line["calibration_error"]
    assert stored["num_rounds"] == line["num_rounds"] > 0
    assert stored["tree"]["num_nodes"] == 24
    assert (place / "draft" / "model.safetensors").read_bytes() == before
    load_draft(place / "draft")


def test_bench_times_every_policy_and_reference_it_is_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = ["bench", *_shared(place), "--passes", "1", "--max-new-tokens", "12"]
    policies = [x for name in ("chain", "dynamic", "adaptive") for x in ("--policy", name)]
    table = ["--table", f"{place}/table.json"]
    assert main([*bench, *policies, *table, "--reference", "generate"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ["plain", "winner", "winner_chain", "winner_dynamic", "winner_adaptive", "generate"]
    assert list(line["arms"]) == names
    assert line["arms"]["winner_adaptive"]["acceptance_length"] >= 1
    assert line["arms"]["winner_adaptive"]["acceptance_rate"] is None
    assert line["arms"]["winner"]["acceptance_rate"] is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--policy", "adaptive", "--reference", "none"], "give --table FILE"),
        (["bench", "--policy", "best"], "--policy: policies"),
        (["bench", "--set", "drafts.mine=x"], "--draft and --set drafts.mine=... are both given"),
        (["bench", "--reference", "none", "--reference", "generate"], "leave one out"),
        (["bench", "--out", "PLACE/data.jsonl"], "is a file"),
        (["bench", "--out", "PLACE/data.jsonl/bench"], "is a file, not a folder"),
        (["bench", "--policy", "chain", "--policy", "chain"], "given twice"),
        (["bench", "--policy", "chain", "--draft", "mine=PLACE/draft"], "no draft is called"),
        (["bench", "--policy", "dynamic", "--chain", "40"], "at most 32"),
        (["bench", "--policy", "adaptive", "--draft", "PLACE/raw"], "dreams-nas calibrate"),
        (["bench", "--policy", "chain", "--draft", "PLACE/silent"], "not to speculate"),
        (["calibrate", "--data", "PLACE/short.jsonl"], "has 2 prompts"),
        (["calibrate", "--num-prompts", "2"], "--num-prompts"),
        (["calibrate", "--set", "num_levels=1"], "draft only 3 nodes"),
        (["calibrate", "--draft", ""], "there is no draft to calibrate"),
    ],
)
def test_bad_input_of_calibrate_and_policies(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    for module in ("dreams_nas.bench.run", "dreams_nas.bench.calibrate"):
        monkeypatch.setattr(f"{module}.load_placed", None)  # nothing may be loaded before
    verb, *more = (argument.replace("PLACE", str(place)) for argument in arguments)
    shared = _shared(place)
    for flag in ("--draft", "--data"):
        if flag in more:
            del shared[(at := shared.index(flag)) : at + 2]
    assert main([verb, *shared, *more]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_folder_may_hold_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "lr=1"
    folder.mkdir()
    assert parse_drafts([str(folder)]) == {"winner": str(folder)}
    assert parse_drafts(["mine=some/where"]) == {"mine": "some/where"}


def test_a_shipped_table_prices_the_adaptive_rule() -> None:
    """Profiled tables begin at two rows for verification: a lone root is a plain step."""
    with resources.as_file(resources.files("dreams_nas.latency_tables")) as folder:
        table = load_table(next(folder.glob("*/embedded-float32.json")))
    target_dims = fake_tables.DIMS
    config = build_config(build_loud_target("llama"), ARCH).replace(
        arch=DraftArch(tap="three", ffn_ratio=0.5, vocab=0.125), target_dims=target_dims
    )
    found = round_costs(table, config, DynamicTree(num_levels=6, width=4, num_nodes=24), kv=150)
    assert len(found.tree_ms) == 25
    for measured in (found.step_ms, found.chain_ms, found.tree_ms):
        assert measured[0] > 0
        assert (np.diff(measured) >= 0).all()
        assert measured[0] < measured[-1]
    assert found.sync_ms > 0


def test_single_precision_differs_at_near_ties_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_loud_target("llava", dtype=torch.float32, seed=4)
    draft = build_draft(target, ARCH)
    winner = Arm("winner", draft, TREES["bushy"])
    calibration = calibrate(target, draft, TREE, build_prompts(target, 6), 20, quiet=True)
    draft.config = draft.config.replace(calibration=calibration)
    monkeypatch.setattr(fake_tables, "DIMS", target.spec.dims)
    table = fake_tables.build_table(space_of(ARCH))
    arms = [PLAIN, winner, *policy_arms(winner, ["chain", "dynamic", "adaptive"], table, kv=30)]
    config = MeasureConfig(max_new_tokens=30, num_passes=1, num_warmup=0)
    report = bench_arms(target, arms, build_prompts(target, 6), config, quiet=True)
    lossless = report.losslessness
    assert lossless.num_tokens_checked > 300
    assert lossless.mismatched_tokens == 0
