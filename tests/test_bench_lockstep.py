"""A decoding and its lockstep replay: the same rounds; and the price of its recorded walk."""

import dataclasses

import fake_tables
import pytest
import torch
from bench_cases import build_arms, build_prompts, space_of
from draft_models import TREES, build_draft, build_loud_target

from dreams_nas.bench.arms import Arm, decode_arm, ready_arm
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.lockstep import build_recording, check_lockstep, count_differing
from dreams_nas.bench.measure import run_bench
from dreams_nas.bench.predicted import predict_arms, recorded_walk
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.predict import predict_speedup
from dreams_nas.replay.lockstep import lockstep_walk
from dreams_nas.space.arch import DraftArch

ARCHS = {
    "kept": DraftArch(tap="last"),
    "dropped": DraftArch(tap="0.5", keep_ratio=0.25, vocab=0.5, depth=2),
    "hidden": DraftArch(tap="last", keep_ratio=0.0),
}
NUM_NEW = 24


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tree", ["chain", "bushy"])
def test_replay_takes_the_rounds_of_decoding(tree: str, arch: str) -> None:
    target = build_loud_target("llava", dtype=torch.float32)
    arm = Arm("winner", build_draft(target, ARCHS[arch]), TREES[tree])
    found = check_lockstep(target, arm, build_prompts(target, 3), NUM_NEW, quiet=True)
    assert found.num_rounds_differing == 0
    assert found.acceptance_length == found.acceptance_length_replayed
    assert found.num_rounds > 0
    if tree == "bushy" and arch != "dropped":
        assert found.acceptance_length is not None
        assert found.acceptance_length > 1, "nothing was accepted, so nothing was compared"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_replay_takes_the_rounds_of_decoding_in_every_family(family: str) -> None:
    target = build_loud_target(family, seed=1)
    arm = Arm("winner", build_draft(target, ARCHS["dropped"]), TREES["bushy"])
    found = check_lockstep(target, arm, build_prompts(target, 3), NUM_NEW, quiet=True)
    assert found.num_rounds_differing == 0
    assert found.num_rounds > 0


def test_a_spoilt_recording_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would see features one position late."""
    from dreams_nas.bench import lockstep

    def build_late(*arguments: object) -> object:
        recording = build_recording(*arguments)  # type: ignore[arg-type]
        return dataclasses.replace(recording, features_TF=recording.features_TF.roll(1, dims=0))

    target = build_loud_target("llava")
    arm = Arm("winner", build_draft(target, ARCHS["kept"]), TREES["bushy"])
    monkeypatch.setattr(lockstep, "build_recording", build_late)
    found = check_lockstep(target, arm, build_prompts(target, 3), NUM_NEW, quiet=True)
    assert found.num_rounds_differing > 0


def test_missing_and_additional_rounds_count_as_differing() -> None:
    target = build_loud_target("llava")
    ready = ready_arm(build_arms(target)[1], target)
    inputs = build_prompts(target, 1)[0].inputs
    live = decode_arm(target, ready, inputs, NUM_NEW)
    fewer = dataclasses.replace(live, rounds=live.rounds[:-2])
    assert count_differing(live, live) == 0
    assert count_differing(live, fewer) == count_differing(fewer, live) == 2


def test_the_recorded_walk_is_the_lockstep_walk() -> None:
    target = build_loud_target("llava")
    arm = Arm("winner", build_draft(target, ARCHS["dropped"]), TREES["bushy"])
    prompts = build_prompts(target, 4)
    config = MeasureConfig(max_new_tokens=NUM_NEW, num_passes=1, num_warmup=0)
    arms = [build_arms(target)[0], arm]
    result = run_bench(target, arms, prompts, config, measure_load=lambda: 0.0, quiet=True)
    ready = ready_arm(arm, target)
    assert ready.draft is not None
    recordings = [
        build_recording(
            p.id,
            p.inputs,
            decode_arm(target, ready, p.inputs, NUM_NEW, want_record=True),
            ready.draft.target_layer_ids,
        )
        for p in prompts
    ]
    expected = lockstep_walk(target, ready.draft, arm.tree, recordings)
    walk = recorded_walk(result, arm)
    for name in ("prompt_N", "root_N", "answer_lengths_P", "prompt_lengths_P", "kept_rows_P"):
        assert getattr(walk, name).tolist() == getattr(expected, name).tolist(), name
    assert walk.tokens_N.tolist() == expected.tokens_N.tolist()
    assert walk.acceptance_length == expected.acceptance_length


def test_prediction_prices_the_recorded_walk_and_says_when_it_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build_loud_target("llava")
    arms = build_arms(target)
    config = MeasureConfig(max_new_tokens=NUM_NEW, num_passes=1, num_warmup=0)
    prompts = build_prompts(target, 3)
    result = run_bench(target, arms, prompts, config, measure_load=lambda: 0.0, quiet=True)
    winner = arms[1]
    assert winner.draft is not None
    arch, dims = winner.draft.config.arch, winner.draft.config.target_dims
    monkeypatch.setattr(fake_tables, "DIMS", dims)
    table = fake_tables.build_table(space_of(arch))
    found = predict_arms(result, table, ["winner", "eagle3"])
    expected = predict_speedup(
        CostModel(table, arch, dims), winner.tree, recorded_walk(result, winner)
    ).summary
    assert found["winner"] is not None
    assert found["winner"].model_dump() == expected.quantiles()
    # The table lacks the baseline's blocks: null, and a reason.
    assert found["eagle3"] is None
    assert "arm 'eagle3' is not priced: the latency table lacks" in capsys.readouterr().err
