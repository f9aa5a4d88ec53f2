"""`generate`, `bench` and `export` on the command line: answers, last lines, and bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from bench_cases import ARCH, BASELINE_ARCH, with_policy
from draft_models import TREES, build_draft
from PIL import Image
from target_models import save_target

from dreams_nas.cli.app import main
from dreams_nas.targets.loading import load_target

PROMPT = "w5 w6 w7"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, two drafts, an image and a data set."""
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "target", "llava")
    target = load_target(folder / "target", "cpu", threads=1)
    with_policy(build_draft(target, ARCH), TREES["bushy"]).save(folder / "draft")
    with_policy(build_draft(target, BASELINE_ARCH), TREES["chain"]).save(folder / "eagle3")
    build_draft(target, ARCH).save(folder / "no_policy")
    Image.new("RGB", (20, 30), "red").save(folder / "chart.png")
    (folder / "notes.png").write_text("not an image")
    lines = [
        {"id": f"s{i}", "images": ["chart.png"], "messages": [_message(f"w{5 + i} w9")]}
        for i in range(2)
    ]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "empty.jsonl").write_text("")
    return folder


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "image"}, {"type": "text", "text": text}]
    return {"role": "user", "content": content}


def call(
    capsys: pytest.CaptureFixture[str], verb: str, place: Path, *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a verb; PLACE in an argument is the folder."""
    filled = [argument.replace("PLACE", str(place)) for argument in arguments]
    capsys.readouterr()
    code = main([verb, *filled])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    return code, shown.out, shown.err


GENERATE = ("--target", "PLACE/target", "--device", "cpu", "--prompt", PROMPT)


def test_a_generation_config_that_is_not_greedy_is_refused_or_said(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(place / "target", tmp_path / "target")
    path = target / "generation_config.json"
    settings = json.loads(path.read_text())
    arguments = ("--target", str(target), "--device", "cpu", "--prompt", PROMPT)
    path.write_text(json.dumps({**settings, "do_sample": True, "temperature": 0.2}))
    code, _, err = call(capsys, "generate", place, *arguments, "--max-new-tokens", "3")
    assert code == 0
    assert "samples (do_sample True, temperature 0.2)" in err
    path.write_text(json.dumps({**settings, "no_repeat_ngram_size": 3}))
    code, out, err = call(capsys, "generate", place, *arguments)
    assert code == 2
    assert out == ""
    assert "no_repeat_ngram_size 3" in err
    assert "generation_config.json" in err


def test_a_draft_gives_the_answer_of_plain_decoding(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*GENERATE, "--image", "PLACE/chart.png", "--max-new-tokens", "20", "--json")
    code, out, err = call(capsys, "generate", place, *arguments)
    assert code == 0
    plain = json.loads(out.splitlines()[-1])
    text = "\n".join(out.splitlines()[:-1])
    assert text == plain["answer"]
    assert plain["num_tokens"] == 20
    assert plain["num_rounds"] == 19
    assert plain["acceptance_length"] is None
    assert "20 tokens in 19 rounds" in err
    code, out, err = call(capsys, "generate", place, *arguments, "--draft", "PLACE/draft")
    assert code == 0
    drafted = json.loads(out.splitlines()[-1])
    assert drafted["answer"] == plain["answer"]
    assert drafted["policy"]["nodes"] == 17
    assert sum(drafted["accepted"]) + drafted["num_rounds"] >= 19
    assert "acceptance length" in err
    code, out, _ = call(
        capsys, "generate", place, *arguments, "--draft", "PLACE/draft", "--chain", "2"
    )
    assert json.loads(out.splitlines()[-1])["policy"]["kind"] == "chain"


def test_without_json_stdout_is_the_answer_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "generate", place, *GENERATE, "--max-new-tokens", "1", "--quiet")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "rounds" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--image", "PLACE/notes.png"), "notes.png: not a readable image"),
        (("--image", "PLACE/none.png"), "none.png: no such image file"),
        (("--draft", "PLACE/none"), "holds no config.json"),
        (("--set", "max_tokens=3"), "did you mean 'max_new_tokens'?"),
        (("--prompt", " "), 'give --prompt "..."'),
        (("--dtype", "float23"), "dtype = float23"),
        (("--target", "PLACE/none"), "no such folder"),
        (("--target", "PLACE"), "holds no config.json, so it is not a target"),
    ],
)
def test_bad_input_is_found_before_a_model_is_loaded(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    def no_model(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("dreams_nas.targets.loading._load_model", no_model)
    code, out, err = call(capsys, "generate", place, *GENERATE, *arguments)
    assert code == 2
    assert out == ""
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "w5 " * 600), "512 positions; shorten the text"),
        (("--max-new-tokens", "511"), "allow at most 507 new tokens"),
        (("--draft", "PLACE/no_policy"), "give --chain LEVELS"),
    ],
)
def test_bad_input_that_needs_the_target(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = call(capsys, "generate", place, *GENERATE, *arguments)
    assert code == 2
    assert out == ""
    assert said in err


def test_a_draft_of_another_target_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "other", "llava", seed=5)
    other = ("--target", str(tmp_path / "other"), "--device", "cpu", "--prompt", PROMPT)
    code, _, err = call(capsys, "generate", place, *other, "--draft", "PLACE/draft")
    assert code == 2
    assert "they must be equal" in err


BENCH = ("--target", "PLACE/target", "--device", "cpu", "--data", "PLACE/data.jsonl")
SMALL = ("--num-prompts", "2", "--passes", "1", "--max-new-tokens", "12", "--quiet")


def test_bench_ends_with_a_line_and_leaves_a_folder_that_export_reads(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = ("--draft", "PLACE/draft", "--draft", "eagle3=PLACE/eagle3")
    out_dir = str(tmp_path / "bench")
    code, out, _ = call(capsys, "bench", place, *BENCH, *drafts, *SMALL, "--out", out_dir)
    assert code == 0
    line = json.loads(out.splitlines()[-1])
    assert list(line["arms"]) == ["plain", "winner", "eagle3", "generate", "prompt_lookup"]
    assert line["mismatched_tokens"] == 0
    assert line["num_rounds_differing"] == 0
    assert line["speedup_predicted"] is None
    assert "2 prompts x 1 passes x 5 arms" in out
    saved = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert saved["summary"]["arms"].keys() == line["arms"].keys()
    assert set(saved["provenance"]["inputs"]) == {"winner", "eagle3"}
    again = (*BENCH, "--draft", "PLACE/draft", *SMALL, "--out", out_dir)
    code, _, err = call(capsys, "bench", place, *again)
    assert (code, json.loads((tmp_path / "bench" / "bench.json").read_text())) == (2, saved)
    assert "--force" in err
    assert call(capsys, "bench", place, *again, "--force")[0] == 0
    code, out, _ = call(
        capsys,
        "export",
        place,
        "--draft",
        "PLACE/draft",
        "--bench",
        out_dir,
        "--out",
        str(tmp_path / "export"),
    )
    assert code == 0
    assert json.loads(out.splitlines()[-1])["policy"]["nodes"] == 17
    assert "This draft is arm `winner`" in (tmp_path / "export" / "README.md").read_text()


def test_report_of_a_run_folder_names_page_and_plots(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = (*BENCH, *SMALL, "--draft", "PLACE/draft", "--out", str(tmp_path / "run" / "bench"))
    assert call(capsys, "bench", place, *bench)[0] == 0
    code, out, _ = call(capsys, "report", place, str(tmp_path / "run"))
    assert code == 0
    line = json.loads(out.splitlines()[-1])
    assert line["plots"] == ["acceptance.png", "speedup.png"]
    assert Path(line["report"]).read_text().startswith("# Report of run")
    code, _, err = call(capsys, "report", place, str(tmp_path / "none"))
    assert code == 2
    assert "no such folder" in err


def test_a_decoding_that_is_not_lossless_fails_after_its_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dreams_nas.decode import rounds

    def accept_anything(plan: Any, drafted: Any, chosen: Any) -> tuple[list[int], list[int]]:
        return [0], [(chosen[0] + 1) % 90]

    monkeypatch.setattr(rounds, "accept_greedy", accept_anything)
    monkeypatch.setattr("dreams_nas.bench.stage.check_lockstep", lambda *_: _no_lockstep())
    code, out, err = call(capsys, "bench", place, *BENCH, "--draft", "PLACE/draft", *SMALL)
    assert code == 1
    assert json.loads(out.splitlines()[-1])["mismatched_tokens"] == 2
    assert "not lossless" in err


def _no_lockstep() -> Any:
    from dreams_nas.bench.lockstep import LockstepReport

    return LockstepReport(
        arm="winner",
        acceptance_length=None,
        acceptance_length_replayed=None,
        num_rounds=0,
        num_rounds_differing=0,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no draft to compare"),
        (("--draft", "PLACE/none"), "holds no config.json"),
        (("--draft", "PLACE/draft", "--data", "PLACE/empty.jsonl"), "holds no conversations"),
        (("--draft", "PLACE/draft", "--table", "PLACE/none.json"), "no such file"),
        (("--draft", "PLACE/draft", "--set", "num_pases=2"), "did you mean 'num_passes'?"),
        (("--draft", "PLACE/draft", "--out", "PLACE"), "holds other files"),
        (("--draft", "a=PLACE/draft", "--draft", "a=PLACE/draft"), "taken or empty"),
    ],
)
def test_bad_input_of_bench_is_found_before_a_target_is_loaded(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("dreams_nas.bench.run.load_placed", None)
    code, out, err = call(capsys, "bench", place, *BENCH, *arguments)
    assert code == 2
    assert out == ""
    assert said in err


def test_a_table_of_another_machine_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fake_tables import build_table

    from dreams_nas.latency.table import save_table

    save_table(build_table(), tmp_path / "table.json")
    table = ("--draft", "PLACE/draft", "--table", str(tmp_path / "table.json"))
    code, _, err = call(capsys, "bench", place, *BENCH, *table, *SMALL)
    assert code == 2
    assert "A CPU of formulas against" in err
    code, out, err = call(capsys, "bench", place, *BENCH, *table, *SMALL, "--allow-mismatch")
    assert code == 0
    assert "warning: the latency table was measured for something else" in err
    assert json.loads(out.splitlines()[-1])["speedup_predicted"] is None
