"""Answers for users: whole or piece by piece, from Python and from the command line."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import fake_tables
import pytest
import torch
from bench_cases import ARCH, space_of, with_policy
from draft_models import TREES, build_draft
from PIL import Image
from target_models import build_prompt, save_target

import dreams_nas
from dreams_nas.bench.calibrate import calibrate
from dreams_nas.bench.measure import Prompt
from dreams_nas.cli.app import main
from dreams_nas.core.device import identify_device
from dreams_nas.core.errors import UserError
from dreams_nas.decode.adaptive import AdaptivePlan
from dreams_nas.decode.decoder import Decoder
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.decode.plan import TreePlan
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.draft.model import load_draft
from dreams_nas.latency.table import save_table
from dreams_nas.space.policy import DynamicTree
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.deployment import target_deployment
from dreams_nas.targets.loading import load_target

PROMPT = "w5 w6 w7"
ADAPTIVE = ("--policy", "adaptive", "--table", "PLACE/table.json", "--threads", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "target", "llava")
    target = load_target(folder / "target", "cpu", threads=1)
    draft = with_policy(build_draft(target, ARCH), TREES["bushy"])
    prompts = [Prompt(str(i), build_prompt(target, seed=i)) for i in range(6)]
    tree = DynamicTree(num_levels=3, width=3, num_nodes=9)
    found = calibrate(target, draft, tree, prompts, 20, quiet=True)
    draft.config = draft.config.replace(calibration=found)
    draft.save(folder / "draft")
    with_policy(build_draft(target, ARCH), TREES["bushy"]).save(folder / "raw")
    Image.new("RGB", (20, 30), "red").save(folder / "chart.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_tables, "DIMS", target.spec.dims)
        table = fake_tables.build_table(space_of(ARCH), deployment=target_deployment(target))
    header = table.header.replace(
        identity=identify_device("cpu"), shape_hash=target.spec.shape_hash
    )
    save_table(table.replace(header=header), folder / "table.json")
    return folder


@pytest.fixture
def decoder(place: Path) -> Decoder:
    found = dreams_nas.load_decoder(
        str(place / "target"), place / "draft", device="cpu", dtype="float64", threads=1
    )
    assert isinstance(found, Decoder)
    return found


def test_pieces_join_to_the_answer_and_say_who_wrote_them(decoder: Decoder, place: Path) -> None:
    images = [place / "chart.png"]
    stream = decoder.stream(PROMPT, images, max_new_tokens=30)
    pieces = list(stream)
    answer = stream.answer
    plain = Decoder(decoder.target).generate(PROMPT, images, max_new_tokens=30)
    assert "".join(piece.text for piece in pieces) == answer.text == plain.text
    assert [piece.token for piece in pieces] == answer.result.tokens == plain.result.tokens
    assert answer.text == decoder.target.decode_text(answer.result.tokens)
    statistics = answer.statistics()
    assert sum(piece.is_accepted for piece in pieces) == sum(statistics["accepted"])
    assert statistics["policy"]["nodes"] == 17
    assert plain.statistics()["accepted"] is None
    assert not any(piece.is_accepted for piece in Decoder(decoder.target).stream(PROMPT))


def test_text_is_out_before_the_answer_has_ended(decoder: Decoder) -> None:
    stream = decoder.stream(PROMPT, max_new_tokens=30)
    first = next(stream)
    assert first.text
    assert len(stream._pieces.answer().result.tokens) == 1
    assert len(stream.answer.result.tokens) > 1


def test_the_text_ends_with_the_stop_string(decoder: Decoder) -> None:
    whole = decoder.generate(PROMPT, max_new_tokens=30)
    words = whole.text.split()
    stop = f"{words[4]} {words[5][:2]}"  # inside a token
    assert whole.text.count(stop) == 1
    settings = GenerationSettings(stop_strings=(stop,))
    stream = decoder.stream(PROMPT, max_new_tokens=30, settings=settings)
    text = "".join(piece.text for piece in stream)
    assert text == stream.answer.text == whole.text[: whole.text.index(stop) + len(stop)]
    assert stream.answer.result.stopped


def test_a_conversation_and_pictures_can_be_given(decoder: Decoder, place: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    messages = [{"role": "user", "content": content}]
    with Image.open(place / "chart.png") as image:
        given = decoder.generate(messages, [image.convert("RGB")], max_new_tokens=9)
    asked = decoder.generate(PROMPT, [place / "chart.png"], max_new_tokens=9)
    assert given.text == asked.text


def test_generate_takes_the_names_of_transformers(place: Path) -> None:
    arguments: dict[str, Any] = {
        "target": str(place / "target"),
        "max_new_tokens": 12,
        "device": "cpu",
    }
    greedy = dreams_nas.generate(PROMPT, draft=place / "draft", **arguments)
    assert greedy.text == dreams_nas.generate(PROMPT, **arguments).text
    sampled = [
        dreams_nas.generate(PROMPT, do_sample=True, temperature=3.0, seed=seed, **arguments).text
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(UserError, match=r"did you mean 'temperature'\?"):
        dreams_nas.generate(PROMPT, temprature=1, **arguments)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dreams_nas.nothing


def test_input_from_python_is_taken_or_refused_by_name(decoder: Decoder, place: Path) -> None:
    chart = place / "chart.png"
    with Image.open(chart) as image:
        answers = [
            decoder.generate(PROMPT, images, max_new_tokens=8).text
            for images in (chart, str(chart), [chart], image.convert("RGBA"), image.convert("P"))
        ]
    assert len(set(answers)) == 1
    with pytest.raises(UserError, match="allow at most"):
        decoder.stream(PROMPT, max_new_tokens=5000)
    drawn = GenerationSettings(do_sample=True, acceptance="residual")
    with pytest.raises(UserError, match="needs a chain"):
        decoder.stream(PROMPT, settings=drawn)
    with pytest.raises(UserError, match="special token"):
        decoder.stream(PROMPT, settings=GenerationSettings(stop_strings=("</s>",)))
    wrong_calls: list[tuple[Any, Any, dict[str, Any], str]] = [
        (None, (), {}, "is no list"),
        (5, (), {}, "is no list"),
        ([], (), {}, "has no message"),
        ([{"foo": 1}], (), {}, "is no chat message"),
        ("a\udcffb", (), {}, "no UTF-8"),
        (PROMPT, None, {}, "images: None is no list"),
        (PROMPT, [5], {}, "a int is no image"),
        (PROMPT, b"abc", {}, "is no list"),
        (PROMPT, (), {"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        (PROMPT, (), {"settings": None}, "GenerationSettings"),
        (PROMPT, (), {"seed": -1}, "seed = -1"),
        (PROMPT, (), {"seed": None}, "seed = None"),
    ]
    for prompt, images, options, said in wrong_calls:
        with pytest.raises(UserError, match=said):
            decoder.generate(prompt, images, **options)
    assert dreams_nas.GenerationSettings is GenerationSettings
    assert {"generate", "load_decoder", "GenerationSettings"} <= set(dir(dreams_nas))
    for wrong, said in (({"dtype": "float23"}, "dtype"), ({"chain": 0}, "chain")):
        with pytest.raises(UserError, match=said):
            dreams_nas.load_decoder(str(place / "target"), **wrong)
    with pytest.raises(UserError, match="stop_strings"):
        dreams_nas.generate(PROMPT, target=str(place / "target"), stop_strings=("",))


def test_a_draft_brings_its_own_tree(decoder: Decoder, place: Path) -> None:
    draft = load_draft(place / "draft", dtype=torch.float64)
    own = Decoder(decoder.target, draft).plan
    assert isinstance(own, TreePlan)
    assert own.tree == TREES["bushy"]
    load = partial(dreams_nas.load_decoder, str(place / "target"), place / "draft", device="cpu")
    chain = load(chain=2).plan
    assert isinstance(chain, TreePlan)
    assert chain.tree == StaticTree.chain(2)
    dynamic = load(policy="dynamic").plan
    assert isinstance(dynamic, DynamicPlan)
    assert (dynamic.num_levels, dynamic.num_nodes) == (4, 17)
    adaptive = load(policy="adaptive", table=place / "table.json", threads=1)
    assert isinstance(adaptive.plan, AdaptivePlan)
    assert adaptive.generate(PROMPT).text == Decoder(adaptive.target).generate(PROMPT).text


def call(capsys: pytest.CaptureFixture[str], place: Path, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    fixed = ("--target", f"{place}/target", "--device", "cpu", "--prompt", PROMPT)
    code = main(["generate", *fixed, "--max-new-tokens", "20", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_trace_holds_every_round(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    draft = ("--draft", f"{place}/draft")
    code, out, _ = call(capsys, place, *draft, "--trace", str(file), "--json")
    assert code == 0
    trace, line = json.loads(file.read_text()), json.loads(out.splitlines()[-1])
    assert trace["answer"] == line["answer"]
    assert len(trace["rounds"]) == line["num_rounds"]
    tokens, position = trace["tokens"], 1
    for done in trace["rounds"]:
        assert len(done["drafted"]) == len(done["parents"]) == 17
        assert done["ms"] > 0
        before = -1
        for node in done["accepted_path"]:
            assert done["parents"][node] == before
            if position < len(tokens):
                assert done["drafted"][node] == tokens[position]
            before, position = node, position + 1
        position += 1


def test_what_changes_nothing_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, place, "--draft", f"{place}/draft", "--table", "nowhere.json")
    assert "--table is not used without --policy adaptive" in err
    _, _, err = call(capsys, place, "--sample", "--acceptance", "block")
    assert "--acceptance is not used without --draft" in err
    _, _, err = call(capsys, place, "--policy", "dynamic")
    assert "--policy is not used without --draft" in err


def test_a_file_and_the_flags_are_one_config(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rules about several keys are kept by the whole, not by the file alone."""
    flags = [a.replace("PLACE", str(place)) for a in ADAPTIVE]
    file = tmp_path / "generate.yaml"
    file.write_text(f"draft: {place}/draft\npolicy: adaptive\n")
    more = flags[flags.index("adaptive") + 1 :]
    code, text, _ = call(capsys, place, "--config", str(file), *more)
    assert (code, text) == (0, call(capsys, place)[1])
    code, _, err = call(capsys, place, "--set", "prompt=Hello")
    assert code == 2
    assert "--prompt and --set prompt=... are both given" in err


@pytest.mark.parametrize("policy", ["chain", "dynamic", "adaptive"])
def test_policies_draft_other_trees_for_the_same_answer(
    policy: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, plain, _ = call(capsys, place)
    file = tmp_path / "trace.json"
    flags = [a.replace("PLACE", str(place)) for a in ADAPTIVE if a != "adaptive"]
    flags.insert(1, policy)
    code, text, _ = call(capsys, place, "--draft", f"{place}/draft", "--trace", f"{file}", *flags)
    assert code == 0
    assert text == plain
    trace = json.loads(file.read_text())
    assert trace["policy"]["kind"] == {"dynamic": "dynamic_tree"}.get(policy, policy)
    for done in trace["rounds"]:
        assert len(done["parents"]) == len(done["drafted"])
        assert all(-1 <= parent < node for node, parent in enumerate(done["parents"]))


def test_sampling_flags_change_the_answer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, greedy, err = call(capsys, place)
    assert "; greedy" in err
    hot = ("--sample", "--temperature", "4", "--draft", f"{place}/draft", "--seed", "1")
    _, sampled, err = call(capsys, place, *hot)
    assert sampled != greedy
    assert "temperature 4" in err
    for more in (("--top-k", "1"), ("--top-p", "0.0001"), ("--min-p", "1"), ("--temperature", "0")):
        assert call(capsys, place, *hot, *more)[1] == greedy
    code, same, err = call(capsys, place, "--temperature", "4", "--top-p", "0.5", "--chain", "2")
    assert code == 0
    assert same == greedy
    assert "temperature, top_p: not used without --sample" in err
    assert "--chain is not used without --draft" in err
    _, penalised, _ = call(capsys, place, "--repetition-penalty", "3")
    assert penalised != greedy
    word = greedy.split()[3]
    _, stopped, _ = call(capsys, place, "--stop", word)
    assert stopped.strip() == greedy[: greedy.index(word) + len(word)]
    chain = ("--chain", "3", "--acceptance")
    for rule in ("residual", "block"):
        code, _, err = call(capsys, place, *hot, *chain, rule)
        assert code == 0
        assert f"acceptance {rule}" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--temperature", "-1"), "--temperature"),
        (("--top-p", "0"), "--top-p"),
        (("--top-p", "1.2"), "--top-p"),
        (("--acceptance", "best"), "--acceptance"),
        (("--stop", ""), "--stop: stop_strings"),
        (("--trace", "PLACE"), "is a folder"),
        (("--trace", "PLACE/chart.png/trace.json"), "is a file, not a folder"),
        (("--chain", "100000", "--draft", "PLACE/draft"), "--chain"),
        (("--sample", "--seed", "99999999999999999999"), "seed = "),
        (("--sample", "--acceptance", "block", "--draft", "PLACE/draft"), "needs a chain"),
        (("--policy", "adaptive", "--draft", "PLACE/draft"), "give --table FILE"),
        (("--policy", "best", "--draft", "PLACE/draft"), "policy"),
        (
            ("--sample", "--acceptance", "block", "--policy", "dynamic", "--draft", "PLACE/draft"),
            "needs a chain",
        ),
        (("--threads", "100000"), "1024"),
        (("--policy", "chain", "--chain", "3", "--draft", "PLACE/draft"), "leave one out"),
        ((*ADAPTIVE, "--draft", "PLACE/raw"), "dreams-nas calibrate"),
        ((*ADAPTIVE, "--draft", "PLACE/draft", "--dtype", "float64"), "float64"),
    ],
)
def test_impossible_settings_end_with_a_rule(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = call(capsys, place, *(a.replace("PLACE", str(place)) for a in arguments))
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err
