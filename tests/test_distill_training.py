"""Training learns, resumes to the same weights, and never trains on nothing."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import build_loud_target
from recordings import made_up_recording, record_answer
from target_models import VOCAB
from torch import Tensor, nn

from dreams_nas.core.errors import RunError, UserError
from dreams_nas.distill import checkpoint as checkpoint_module
from dreams_nas.distill import trainer as trainer_module
from dreams_nas.distill.finetune import build_draft, train_draft
from dreams_nas.distill.recipes import Recipe, SupernetTrainingConfig
from dreams_nas.distill.supernet_training import train_supernet
from dreams_nas.distill.trainer import StepLoss, learning_rate, train
from dreams_nas.features.recording import Recording
from dreams_nas.replay.batched import record_rank_paths
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import walk
from dreams_nas.supernet.checkpoint import load_supernet, supernet_config
from dreams_nas.targets.huggingface import HuggingFaceTarget

SPACE = SearchSpace(
    tap=("three", "last"),
    depth=(1, 2),
    head_ratio=(0.5, 1.0),
    ffn_ratio=(0.5, 1.0),
    keep_ratio=(0.5, 1.0),
    vocab=(0.25, 1.0),
)
ORDER = torch.arange(VOCAB)


class Killed(Exception):
    """Stands for a kill in the middle of a run."""


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return build_loud_target("llava", num_layers=4, dtype=torch.float32)


@pytest.fixture(scope="module")
def recordings(target: HuggingFaceTarget) -> list[Recording]:
    return [record_answer(target, 16, num_images=s % 2, seed=s) for s in range(8)]


def tau(target: HuggingFaceTarget, draft: Any, recordings: list[Recording]) -> float:
    """Acceptance length of a chain of three."""
    size = len(draft.vocab_ids_W)
    paths = record_rank_paths(
        draft.weights(target.head_weight_VD),
        recordings,
        target.embed,
        target_layer_ids=draft.config.sizes.target_layer_ids,
        keep_ratio=draft.config.arch.keep_ratio,
        vocab_order=draft.vocab_ids_W,
        num_vocabs=(size,),
        num_levels=3,
    )[size]
    found = walk(paths, StaticTree.chain(3)).acceptance_length
    assert found is not None
    return found


def test_training_lowers_the_loss_and_raises_acceptance(
    target: HuggingFaceTarget, recordings: list[Recording], tmp_path: Path
) -> None:
    draft = build_draft(DraftArch(tap="three", keep_ratio=0.5), target, ORDER, seed=1)
    before = tau(target, draft, recordings)
    recipe = Recipe(num_steps=60, lr=5e-3, batch_tokens=400, num_unroll_levels=3)
    report = train_draft(draft, recordings, target, recipe, folder=tmp_path, quiet=True)
    assert report.num_steps == 60
    assert report.log[-1]["kl"] < 0.5 * report.log[0]["kl"]
    assert report.log[-1]["acceptance_estimate"] > report.log[0]["acceptance_estimate"] + 0.3
    assert tau(target, draft, recordings) > before + 0.3
    lines = (tmp_path / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == report.log
    assert report.log[0]["lr"] == 0
    assert report.log[-1]["lr"] < report.log[2]["lr"]
    assert json.loads((tmp_path / "training.json").read_text())["num_steps"] == 60
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("name", ["eagle", "eagle3", "half"])
def test_other_recipes_train_too(
    name: str, target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    options: dict[str, Any] = {
        "eagle": {"num_unroll_levels": 1, "kl_weight": 0.1, "feature_weight": 1.0},
        "eagle3": {"num_unroll_levels": 7, "level_decay": 0.8},
        "half": {"dtype": "bfloat16", "average_decay": 0.8},
    }[name]
    draft = build_draft(DraftArch(tap="last"), target, ORDER, seed=1)
    recipe = Recipe(num_steps=31, lr=5e-3, batch_tokens=400, **options)
    log = train_draft(draft, recordings, target, recipe, quiet=True).log
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    assert ("feature" in log[0]) == (name == "eagle")
    assert sum(key.startswith("accuracy_") for key in log[0]) == min(7, recipe.num_unroll_levels)
    assert all(parameter.dtype == torch.float32 for parameter in draft.parameters())


def supernet_config_of(**recipe: Any) -> SupernetTrainingConfig:
    return SupernetTrainingConfig(
        recipe=Recipe(**{"num_steps": 12, "lr": 2e-3, "batch_tokens": 150, **recipe}),
        full_share=0.5,
        num_random=1,
        num_calibration_batches=2,
    )


def trained_in(
    folder: Path, target: HuggingFaceTarget, recordings: list[Recording]
) -> dict[str, Tensor]:
    config = supernet_config_of(average_decay=0.5)
    net, _ = train_supernet(
        SPACE, recordings, target, ORDER, config, seed=3, folder=folder, quiet=True
    )
    return net.state_dict()


@pytest.fixture(scope="module")
def whole(
    target: HuggingFaceTarget, recordings: list[Recording], tmp_path_factory: Any
) -> tuple[Path, dict[str, Tensor]]:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained_in(folder, target, recordings)


@pytest.mark.parametrize("killed_at", [3, 6, 9])
def test_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    killed_at: int,
    target: HuggingFaceTarget,
    recordings: list[Recording],
    whole: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "killed"
    real_step, steps = trainer_module._Loop._step, []

    def dying_step(loop: Any, progress: float) -> Any:
        if len(steps) == killed_at:
            raise Killed
        steps.append(progress)
        return real_step(loop, progress)

    # A checkpoint after every step, then a kill in the middle of the next one.
    monkeypatch.setattr(trainer_module._Loop, "_step", dying_step)
    monkeypatch.setattr(
        trainer_module._Loop, "__init__", _with_checkpoints(trainer_module._Loop.__init__)
    )
    with pytest.raises(Killed):
        trained_in(folder, target, recordings)
    monkeypatch.setattr(trainer_module._Loop, "_step", real_step)
    state = json.loads((folder / "checkpoint/state.json").read_text())
    assert state["step"] == killed_at
    assert state["task"] == {"is_ordered": killed_at > 6}
    resumed = trained_in(folder, target, recordings)
    for name, tensor in whole[1].items():
        assert torch.equal(tensor, resumed[name]), name
    logs = [(where / "training_log.jsonl").read_text() for where in (whole[0], folder)]
    steps_logged = [[json.loads(x)["step"] for x in log.splitlines()] for log in logs]
    assert steps_logged[0] == steps_logged[1] == [1, 11]
    loaded, described = load_supernet(folder, target)
    assert torch.equal(loaded.body.fc, whole[1]["body.fc"])
    assert described == supernet_config(target, SPACE.tap_layers(target.spec.dims), 2)


def _with_checkpoints(init: Any) -> Any:
    def patched(loop: Any, *args: Any) -> None:
        init(loop, *args[:-1], 0.0)

    return patched


def test_checkpoint_of_another_training_is_refused(
    target: HuggingFaceTarget, recordings: list[Recording], tmp_path: Path
) -> None:
    draft = build_draft(DraftArch(tap="last"), target, ORDER, seed=1)
    task = _Constant(draft)
    train(task, Recipe(num_steps=2), folder=tmp_path, fingerprint={"seed": 1}, quiet=True,
          checkpoint_seconds=0)  # fmt: skip
    with pytest.raises(UserError, match="seed = 1, this one has 2"):
        train(task, Recipe(num_steps=2), folder=tmp_path, fingerprint={"seed": 2}, quiet=True)
    with pytest.raises(UserError, match=r"lr = 0\.002, this one has 0\.5"):
        train(
            task, Recipe(num_steps=2, lr=0.5), folder=tmp_path, fingerprint={"seed": 1}, quiet=True
        )
    (tmp_path / "checkpoint/state.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="remove it to start again"):
        train(task, Recipe(num_steps=2), folder=tmp_path, fingerprint={"seed": 1}, quiet=True)


class _Constant:
    """A task whose loss is given."""

    def __init__(self, module: nn.Module, factor: float = 1.0) -> None:
        self.module, self.factor = module, factor
        self.progress: list[float] = []

    def before_step(self, step: int, progress: float, *_: Any) -> None:
        self.progress.append(progress)

    def num_losses(self, step: int, progress: float) -> int:
        return 2

    def losses(self, *_: Any) -> Iterator[StepLoss]:
        weight = next(iter(self.module.parameters()))
        yield StepLoss(self.factor * weight.square().sum(), {})
        yield StepLoss(weight.sum(), {})

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        assert not state


def test_time_budget_drives_schedule_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: float(next(clock)))
    task = _Constant(nn.Linear(2, 2))
    recipe = Recipe(max_seconds=40, warmup=0.0)
    report = train(task, recipe, quiet=True)
    assert report.seconds >= 40
    assert task.progress == sorted(task.progress)
    assert task.progress[-1] < 1
    assert len(task.progress) == report.num_steps == 40
    assert report.log[-1]["lr"] < 0.2 * recipe.lr
    short = train(_Constant(nn.Linear(2, 2)), recipe.replace(num_steps=4), quiet=True)
    assert short.num_steps == 4


def test_learning_rate_rises_and_falls_to_zero() -> None:
    recipe = Recipe(lr=1.0, warmup=0.1)
    assert learning_rate(recipe, 0.05) == pytest.approx(0.5)
    assert learning_rate(recipe, 0.1) == pytest.approx(1.0)
    assert learning_rate(recipe, 0.55) == pytest.approx(0.5)
    assert learning_rate(recipe, 1.0) == pytest.approx(0.0, abs=1e-9)
    assert learning_rate(recipe.replace(schedule="constant"), 0.9) == 1.0


def test_bad_runs_say_so(target: HuggingFaceTarget, recordings: list[Recording]) -> None:
    with pytest.raises(UserError, match="needs a budget"):
        train(_Constant(nn.Linear(2, 2)), Recipe(), quiet=True)
    with pytest.raises(RunError, match="norm is nan at step 0"):
        train(_Constant(nn.Linear(2, 2), float("nan")), Recipe(num_steps=2), quiet=True)
    draft = build_draft(DraftArch(tap="last"), target, ORDER, seed=1)
    lonely = [made_up_recording([3], prompt=[1, 2], hidden=32, dtype=torch.float32)]
    for nothing in ([], lonely):
        with pytest.raises(UserError, match="nothing to train on"):
            train_draft(draft, nothing, target, Recipe(num_steps=1), quiet=True)
    other = build_loud_target("llava", num_layers=4, dtype=torch.float32, seed=5)
    with pytest.raises(UserError, match="this draft belongs to target"):
        train_draft(draft, recordings, other, Recipe(num_steps=1), quiet=True)


def test_answers_without_a_supervised_token_are_left_out_and_counted(
    target: HuggingFaceTarget, recordings: list[Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    draft = build_draft(DraftArch(tap="last"), target, ORDER, seed=1)
    lonely = record_answer(target, 1, num_images=0, seed=40)
    train_draft(draft, [lonely, *recordings], target, Recipe(num_steps=1), quiet=True)
    assert "1 of 9 recorded answers" in capsys.readouterr().err


def test_supernet_training_lowers_every_corner(
    target: HuggingFaceTarget, recordings: list[Recording]
) -> None:
    config = supernet_config_of(num_steps=40, lr=5e-3)
    net, _ = train_supernet(SPACE, recordings, target, ORDER, config, seed=3, quiet=True)
    described = supernet_config(target, net.tap_layer_ids, 2)
    untrained, _ = train_supernet(
        SPACE, recordings, target, ORDER, supernet_config_of(num_steps=1), seed=3, quiet=True
    )
    for arch in (
        SPACE.largest(),
        SPACE.smallest(),
        SPACE.largest().replace(tap="last"),
        SPACE.largest().replace(depth=1, head_ratio=0.5),
    ):
        trained = tau(target, net.extract(described.draft_config(arch)), recordings)
        start = tau(target, untrained.extract(described.draft_config(arch)), recordings)
        assert trained > start + 0.1, arch.key


def test_log_and_checkpoint_are_one_state(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    state = checkpoint_module.TrainState({"seed": 1}, step=7, log=[{"step": 7, "loss": 1.5}])
    optimizer = torch.optim.AdamW(module.parameters())
    parameters = dict(module.named_parameters())
    checkpoint_module.save_checkpoint(tmp_path, state, parameters, optimizer, {})
    expected = checkpoint_module.TrainState({"seed": 1})
    found = checkpoint_module.load_checkpoint(tmp_path, expected, parameters, optimizer, {})
    assert found == state
    assert json.loads((tmp_path / "training_log.jsonl").read_text()) == state.log[0]
