"""A whole run on a tiny random target: every stage, resume, no winner, bad input. No speeds."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cheap_drafts import cheap_drafts, scale_drafts
from PIL import Image
from target_models import save_target
from test_bench_summary import KEYS

from dreams_nas.cli.app import main
from dreams_nas.core.yaml_data import write_yaml

__all__ = ["cheap_drafts"]  # a fixture, used by name

STAGES = [
    "collect-train",
    "collect-choose",
    "collect-score",
    "profile",
    "train",
    "search",
    "finetune",
    "baseline",
    "bench",
    "export",
    "report",
]


def write_prompts(folder: Path, split: str, count: int) -> str:
    rng = random.Random(split)
    lines = []
    for index in range(count):
        image = f"{split}-{index}.png"
        Image.new("RGB", (12, 12), tuple(rng.randrange(256) for _ in range(3))).save(folder / image)
        words = " ".join(f"w{rng.randrange(3, 79)}" for _ in range(6))
        content = [{"type": "image"}, {"type": "text", "text": words}]
        lines.append(
            {
                "id": f"{split}-{index}",
                "images": [image],
                "messages": [{"role": "user", "content": content}],
            }
        )
    path = folder / f"{split}.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path.as_posix()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a space, data and a run's configuration."""
    folder = tmp_path_factory.mktemp("project")
    save_target(folder / "target", "llava", num_layers=4)
    write_yaml(
        folder / "space.yaml",
        {
            "tap": ["last", "three"],
            "vocab": [0.5, 1.0],
            "keep_ratio": [0.25, 1.0],
            "policy": {"kind": "static_tree", "levels": [0, 3], "nodes": [1, 6]},
        },
    )
    write_yaml(folder / "small.yaml", {"tap": ["last"], "vocab": [0.5]})
    splits = {name: write_prompts(folder, name, 4) for name in ("choose", "score", "test")}
    write_yaml(
        folder / "run.yaml",
        {
            "target": (folder / "target").as_posix(),
            "space": (folder / "space.yaml").as_posix(),
            "device": "cpu",
            "threads": 1,
            "data": {
                "train": write_prompts(folder, "train", 8),
                **splits,
                "num_train": 8,
                "num_choose": 4,
                "num_score": 4,
                "num_test": 3,
                "max_new_tokens": 12,
            },
            "profile_budget_s": 3,
            "max_kv": 64,
            "train": {"recipe": {"num_steps": 4}, "num_calibration_batches": 1},
            "search": {"num_finalists": 2, "num_prompts": 2},
            "finetune": {"num_steps": 2},
            "num_passes": 1,
        },
    )
    return folder


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return line


@pytest.mark.usefixtures("cheap_drafts")
def test_a_run_goes_through_every_stage_and_resumes(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(project / "run.yaml"), "--out", str(tmp_path / "run"), "--quiet"]
    assert main(arguments) == 0
    line = last_line(capsys)
    assert line.keys() >= KEYS
    assert list(line["seconds_by_stage"]) == STAGES
    assert line["mismatched_tokens"] == 0
    assert line["num_tokens_checked"] > 0
    assert line["num_rounds_differing"] == 0
    assert line["acceptance_length_replayed"] == line["acceptance_length"]
    assert list(line["arms"]) == ["plain", "winner", "eagle3"]
    assert line["winner"]["policy"]["nodes"] > 0
    for name in ("export/config.json", "export/README.md", "report", "config.yaml"):
        assert (tmp_path / "run" / name).exists()

    assert main(arguments) == 0
    assert last_line(capsys) == line  # nothing was measured again

    assert main([*arguments, "--set", "num_passes=2"]) == 0
    again = last_line(capsys)
    kept = {k: v for k, v in line["seconds_by_stage"].items() if k in STAGES[:8]}
    assert {k: again["seconds_by_stage"][k] for k in kept} == kept
    assert again["num_passes"] == 2

    more = [*arguments, "--set", "finetune.num_steps=3"]
    assert main(more) == 0
    changed = last_line(capsys)
    kept = {k: v for k, v in line["seconds_by_stage"].items() if k in STAGES[:6]}
    assert {k: changed["seconds_by_stage"][k] for k in kept} == kept
    assert changed["seconds_by_stage"]["finetune"] != line["seconds_by_stage"]["finetune"]


def test_where_drafting_never_pays_the_answer_is_plain_decoding(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scale_drafts(monkeypatch, 1e3)
    assert main(["run", str(project / "run.yaml"), "--out", str(tmp_path), "--quiet"]) == 0
    line = last_line(capsys)
    assert line.keys() >= KEYS
    assert line["winner"] is None
    assert line["winner_over_eagle3"] is None
    assert list(line["arms"]) == ["plain"]
    assert not (tmp_path / "draft").exists()


def test_a_run_that_was_killed_goes_on(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(project / "run.yaml"), "--out", str(tmp_path), "--quiet"]
    # The child dies by the kernel's own hand as soon as the second stage has begun.
    program = (
        "import os, signal, sys\n"
        "from dreams_nas.cli.app import main\n"
        "from dreams_nas.pipeline import run\n"
        "collect = run.collect\n"
        "def dying(*a, split, **k):\n"
        "    if split == 'choose':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return collect(*a, split=split, **k)\n"
        "run.collect = dying\n"
        "main(sys.argv[1:])\n"
    )
    died = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=dict(os.environ), check=False
    )
    assert died.returncode == -signal.SIGKILL
    before = json.loads((tmp_path / "run.json").read_text())["stages"]
    assert list(before) == ["collect-train"]
    assert main(arguments) == 0
    line = last_line(capsys)
    assert line.keys() >= KEYS
    assert line["seconds_by_stage"]["collect-train"] == before["collect-train"]["seconds"]


def test_another_table_or_data_redoes_what_reads_them(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "train.jsonl"
    copied.write_bytes((project / "train.jsonl").read_bytes())
    for image in project.glob("train-*.png"):
        (tmp_path / image.name).write_bytes(image.read_bytes())
    out = tmp_path / "run"
    arguments = ["run", str(project / "run.yaml"), "--out", str(out), "--quiet"]
    arguments += ["--set", f"data.train={copied}", "--set", "baseline.kind=none"]
    assert main(arguments) == 0
    first = last_line(capsys)["seconds_by_stage"]
    table = tmp_path / "table.json"
    table.write_bytes((out / "table.json").read_bytes())
    lines = copied.read_text().splitlines()
    copied.write_text("\n".join(lines[:-1]))
    assert main([*arguments, "--set", f"table={table}"]) == 0
    second = last_line(capsys)["seconds_by_stage"]
    assert second["collect-train"] != first["collect-train"]
    assert second["train"] != first["train"]
    assert second["collect-score"] == first["collect-score"]
    assert (out / "table.json").read_bytes() == table.read_bytes()


@pytest.mark.usefixtures("cheap_drafts")
def test_a_baseline_trained_alone_is_measured_with_its_tuned_and_the_published_tree(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(project / "run.yaml"), "--out", str(tmp_path), "--quiet"]
    baseline = "baseline={kind: alone, num_levels: 4, num_nodes: 9}"
    assert main([*arguments, "--set", baseline]) == 0
    line = last_line(capsys)
    assert list(line["arms"]) == ["plain", "winner", "eagle3", "eagle3_published_tree"]
    published = line["arms"]["eagle3_published_tree"]["policy"]
    assert published["nodes"] == 9
    assert published["levels"] <= 4
    assert line["mismatched_tokens"] == 0
    training = json.loads((tmp_path / "baseline" / "training.json").read_text())
    assert training["num_steps"] == 4 + 2  # supernet's and winner's together
    assert training["recipe"]["num_unroll_levels"] == 7


def test_one_sample_in_two_splits_is_refused(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(project / "run.yaml"), "--out", str(tmp_path), "--quiet"]
    renamed = project / "renamed.jsonl"  # another id does not make it another sample
    renamed.write_text((project / "train.jsonl").read_text().replace('"id": "', '"id": "x'))
    for data in ("train.jsonl", "renamed.jsonl"):
        assert main([*arguments, "--set", f"data.test={project / data}"]) == 2
        assert "in the splits train and test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("target=nowhere", "nowhere"),
        ("space=demmo", "did you mean 'demo'"),
        ("finetune.num_stpes=3", "did you mean 'num_steps'"),
        ("data.test=missing.jsonl", "missing.jsonl"),
        ("data.num_test=0", "greater than or equal to 1"),
        ("device=cuda:99", "cuda:99"),
        ("finetune.max_seconds=-1", "greater than 0"),
        ("search.max_drafts=3", "has 8 drafts"),
        ("space=small.yaml", "lacks the point of eagle3"),
    ],
)
def test_bad_input_is_named_before_a_model_loads(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    message: str,
) -> None:
    monkeypatch.chdir(project)
    arguments = ["run", str(project / "run.yaml"), "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*arguments, "--set", setting]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_empty_data_set_and_a_broken_image_are_named(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.png").write_bytes(b"no image")
    entry = {"images": ["broken.png"], "messages": [{"role": "user", "content": "<image> w3"}]}
    (tmp_path / "broken.jsonl").write_text(json.dumps(entry))
    for name, message in (("empty", "no conversations"), ("broken", "broken.png")):
        path = (tmp_path / f"{name}.jsonl").as_posix()
        arguments = ["run", str(project / "run.yaml"), "--set", f"data.train={path}"]
        assert main([*arguments, "--out", str(tmp_path / "run"), "--quiet"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_killed_at_the_end_of_every_stage_goes_on(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage dies with its work done and not yet noted; the next start takes it from there."""
    arguments = ["run", str(project / "run.yaml"), "--out", str(tmp_path), "--quiet"]
    program = (
        "import os, signal, sys\n"
        "from dreams_nas.cli.app import main\n"
        "from dreams_nas.pipeline.run_folder import RunFolder\n"
        "def die(self, stage, seconds):\n"
        "    if stage.name == sys.argv[1]:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    finish(self, stage, seconds)\n"
        "finish, RunFolder._finish = RunFolder._finish, die\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    for stage in (name for name in STAGES if name not in ("finetune", "baseline", "export")):
        died = subprocess.run([sys.executable, "-c", program, stage, *arguments], check=False)
        assert died.returncode == -signal.SIGKILL, stage
    assert main(arguments) == 0
    line = last_line(capsys)
    assert line.keys() >= KEYS
    assert line["mismatched_tokens"] == 0
