"""Calibration, further policies of the winner, transformers' own arms, shares of a round."""

import json
from pathlib import Path
from typing import Any

import fake_tables
import numpy as np
import pytest
import torch
from bench_cases import ARCH, build_arms, build_prompts, space_of, with_policy
from draft_models import TREES, build_draft, build_loud_target
from target_models import build_prompt, save_target

from dreams_nas.bench.arms import PLAIN, Arm, decode_arm, ready_arm
from dreams_nas.bench.calibrate import by_level, calibrate, calibration_error, fit, isotonic
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.measure import run_bench
from dreams_nas.bench.policies import policy_arms
from dreams_nas.bench.references import REFERENCE_NAMES, decode_reference
from dreams_nas.bench.stage import bench_arms
from dreams_nas.bench.summary import summary_line
from dreams_nas.cli.app import main
from dreams_nas.core.errors import UserError
from dreams_nas.decode.engine import Round, decode
from dreams_nas.decode.parts import PART_NAMES
from dreams_nas.space.policy import Calibration, DynamicTree
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
    assert (np.diff(acceptance) > 0).all()
    assert acceptance[0] < 0.1 < 0.8 < acceptance[-1]
    _, falling = isotonic(scores, 1 - rising)
    assert len(falling) == 1
    assert falling[0] == pytest.approx(1 - rising.mean())


def test_paths_are_sorted_by_level_and_fitted() -> None:
    done = Round((5, 6, 7), (0, 2), 0.1, (-1, -1, 0), (-0.1, -2.0, -0.3))
    miss = Round((5, 6, 7), (), 0.1, (-1, -1, 0), (-0.2, -2.5, -0.4))
    levels = by_level([done, miss], 3)
    assert [level.scores for level in levels] == [[-0.1, -2.0, -0.2, -2.5], [-0.3, -0.4], []]
    assert [level.accepted for level in levels] == [[True, False, False, False], [True, False], []]
    assert levels[0].num_going_on == 1
    fitted = fit(levels)
    assert len(fitted) == 2
    assert fitted[0].continuation == 1.0
    assert fitted[1].continuation == 0.0


def test_the_calibration_error_is_the_distance_to_the_frequency() -> None:
    rounds = [
        Round((1,), (0,) if i % 4 == 0 else (), 0.1, (-1,), (-0.5,)) for i in range(40)
    ]  # a quarter is accepted
    level = fit(by_level(rounds, 1))[0].replace(acceptance=(0.75,), log_probabilities=(-0.5,))
    wrong = Calibration(
        tree=DynamicTree(num_levels=1, width=1, num_nodes=1),
        levels=(level,),
        error=0.0,
        num_rounds=1,
    )
    assert calibration_error(wrong, by_level(rounds, 1)) == pytest.approx(0.5)


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


def test_an_arm_of_transformers_is_timed_but_is_no_plain_arm() -> None:
    target = build_loud_target("llama")
    arms = [Arm("generate", reference="generate")]
    config = MeasureConfig(max_new_tokens=4, num_passes=1, num_warmup=0)
    with pytest.raises(UserError, match="one must be 'plain'"):
        run_bench(target, arms, build_prompts(target, 1), config, quiet=True)
    assert not ready_arm(arms[0], target).arm.is_speculative
    assert decode_arm(target, ready_arm(PLAIN, target), build_prompt(target), 4).tokens


def test_calibrate_and_bench_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target", "llava")
    target = load_target(tmp_path / "target", "cpu", threads=1)
    with_policy(build_draft(target, ARCH), TREES["chain"]).save(tmp_path / "draft")
    lines = [
        {"id": f"s{i}", "messages": [{"role": "user", "content": f"w{5 + i} w9 w{20 + i}"}]}
        for i in range(6)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    shared = ["--target", f"{tmp_path}/target", "--device", "cpu", "--quiet"]
    data = ["--data", f"{tmp_path}/data.jsonl", "--num-prompts", "6"]
    draft = ["--draft", f"{tmp_path}/draft"]
    before = (tmp_path / "draft" / "model.safetensors").read_bytes()
    code = main(["calibrate", *shared, *data, *draft, "--set", "max_new_tokens=40"])
    out = capsys.readouterr().out
    if code == 0:  # a random draft may never be right
        assert json.loads(out.splitlines()[-1])["num_rounds"] > 0
        stored = json.loads((tmp_path / "draft" / "config.json").read_text())
        assert stored["calibration"]["tree"]["num_nodes"] == 24
    assert code in (0, 2)
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before
    bench = ["bench", *shared, *data, *draft, "--passes", "1", "--max-new-tokens", "6"]
    assert main([*bench, "--policy", "dynamic", "--reference", "generate"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(line["arms"]) == ["plain", "winner", "winner_dynamic", "generate"]
    assert main([*bench, "--policy", "adaptive", "--reference", "none"]) == 2
    assert main([*bench, "--policy", "best"]) == 2
    assert "policies" in capsys.readouterr().err


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
