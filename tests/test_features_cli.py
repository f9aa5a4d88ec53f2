"""`dreams-nas collect` from files to a store, and its exit codes."""

import json
from pathlib import Path

import pytest
from feature_data import build_llava
from PIL import Image

from dreams_nas.cli.app import main
from dreams_nas.features.store import load_features


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collect")
    target = build_llava()
    target.model.save_pretrained(folder / "target")
    target.processor.save_pretrained(folder / "target")
    lines = []
    for number in range(5):
        Image.new("RGB", (16, 16), (40 * number, 0, 0)).save(folder / f"{number}.png")
        turn = {"from": "human", "value": f"<image>\n{'a b c d e'[: 2 * number + 1]}"}
        lines.append({"id": number, "image": f"{number}.png", "conversations": [turn]})
    (folder / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def run(folder: Path, *arguments: str) -> int:
    settings = [
        f"out={folder / 'out'}",
        f"data={folder / 'data.jsonl'}",
        "taps=[last]",
        "max_new_tokens=5",
    ]
    flags = ["--target", str(folder / "target"), "--device", "cpu"]
    for setting in settings:
        flags += ["--set", setting]
    return main(["collect", *flags, *arguments])


def test_collect_ends_with_one_json_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--set", "count=4") == 0
    shown = capsys.readouterr()
    line = json.loads(shown.out.splitlines()[-1])
    assert (line["num_recordings"], line["num_answer_tokens"]) == (4, 20)
    assert "at most" in shown.err
    store = load_features(folder / "out")
    assert [recording.id for recording in store] == ["0", "1", "2", "3"]
    # Again: nothing to do. Other prompts: refused, then replaced.
    assert run(folder, "--set", "count=4", "--quiet") == 0
    again = capsys.readouterr()
    assert json.loads(again.out.splitlines()[-1]) == line
    assert "at most" not in again.err
    assert run(folder) == 2
    assert "conversations:" in capsys.readouterr().err
    assert run(folder, "--force", "--quiet") == 0
    assert len(load_features(folder / "out")) == 5


@pytest.mark.parametrize(
    ("setting", "code", "text"),
    [
        ("max_new_tokenz=3", 2, "max_new_tokens"),
        ("taps=[lst]", 2, "taps"),
        ("taps=[three]", 2, "must differ"),
        ("data=embedded:tran", 2, "embedded:train"),
        ("data=none.jsonl", 2, "no such file"),
        ("max_length=8", 1, "none of the 5 prompts fits"),
    ],
)
def test_bad_input_has_its_exit_code(
    folder: Path, setting: str, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--set", setting, "--set", f"out={folder / 'bad'}") == code
    assert text in capsys.readouterr().err
    assert not (folder / "bad").exists()
