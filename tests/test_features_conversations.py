"""Conversations from files and from the embedded generator, and what is wrong with broken ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dreams_nas.core.errors import UserError
from dreams_nas.features.conversations import Conversation, load_conversations, split_of

TURN = {"role": "user", "content": "hello"}
WITH_IMAGE = [{"type": "image"}, {"type": "text", "text": "what is this"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in (("red.png", (255, 0, 0)), ("blue.png", (0, 0, 255))):
        Image.new("RGB", (8, 6), colour).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no image")
    noise = Image.effect_noise((64, 64), 100)
    noise.save(tmp_path / "cut.png")
    whole = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    return tmp_path


def write(folder: Path, *entries: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    return path


def test_both_forms_and_both_files_give_the_same_prompt(folder: Path) -> None:
    hugging_face = {
        "id": "a",
        "images": ["red.png"],
        "messages": [
            {"role": "user", "content": WITH_IMAGE},
            {"role": "assistant", "content": "a red box"},
        ],
    }
    llava = {
        "id": "a",
        "image": "red.png",
        "conversations": [
            {"from": "human", "value": "<image>\nwhat is this"},
            {"from": "gpt", "value": "a red box"},
            {"from": "human", "value": "are you sure"},
        ],
    }
    (folder / "list.json").write_text(json.dumps([llava]))
    [first] = load_conversations(write(folder, hugging_face))
    [second] = load_conversations(folder / "list.json")
    assert first.messages == second.messages == ({"role": "user", "content": WITH_IMAGE},)
    assert first.content_hash() == second.content_hash()
    assert first.load_images()[0].getpixel((0, 0)) == (255, 0, 0)


def test_history_is_kept_and_ids_are_made_up(folder: Path) -> None:
    turns = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "<image> and <image> differ how"},
        {"role": "assistant", "content": "by colour"},
        {"role": "user", "content": "which one is red"},
    ]
    path = write(
        folder, {"messages": [TURN]}, {"images": ["red.png", "blue.png"], "messages": turns}
    )
    plain, second = load_conversations(path)
    assert (plain.id, second.id) == ("data-0", "data-1")
    assert plain.messages == ({"role": "user", "content": "hello"},)
    assert [message["role"] for message in second.messages] == [t["role"] for t in turns]
    kinds = [part["type"] for part in second.messages[1]["content"]]
    assert kinds == ["image", "text", "image", "text"]
    assert [i.getpixel((0, 0)) for i in second.load_images()] == [(255, 0, 0), (0, 0, 255)]
    assert [c.id for c in load_conversations(path, count=1)] == ["data-0"]


BROKEN = [
    ({"id": "x", "images": ["none.png"], "messages": [{"role": "user", "content": WITH_IMAGE}]},
     r"data.jsonl:2, sample 'x': image .*none.png does not exist"),
    ({"id": "x", "images": ["text.png"], "messages": [{"role": "user", "content": WITH_IMAGE}]},
     r"data.jsonl:2, sample 'x': .*text.png is no image"),
    ({"id": "x", "messages": [{"role": "user", "content": WITH_IMAGE}]},
     r"data.jsonl:2, sample 'x': 0 images, but 1 places"),
    ({"id": "x", "image": "red.png", "conversations": [{"from": "human", "value": "no marker"}]},
     r"data.jsonl:2, sample 'x': 1 images, but 0 places"),
    ({"id": "x", "messages": []}, "data.jsonl:2.*at least one"),
    ({"id": "x", "messages": [{"role": "assistant", "content": "yes"}]}, "should be the user's"),
    ({"id": "x", "messages": [{"role": "robot", "content": "yes"}]}, "system, user, assistant"),
    ({"id": "x", "messages": [{"role": "user", "content": 5}]}, "content = 5"),
    ({"id": "x", "messages": [{"role": "user", "content": [{"type": "video"}]}]}, "a part is"),
    ({"id": "x", "conversations": [{"from": "gpt", "value": "yes"}]}, "no turn from 'human'"),
    ({"id": "x", "conversations": ["yes"]}, "'from' and 'value'"),
    ({"id": "x", "text": "hello"}, "either 'messages' or 'conversations'"),
    ({"id": "x", "image": 3, "messages": [TURN]}, "images = 3"),
    ({"id": "x", "image": "a", "images": [], "messages": [TURN]}, "both 'image' and 'images'"),
    ({"id": "first", "messages": [TURN]}, "'first': this id is taken by .*data.jsonl:1"),
    ("hello", "data.jsonl:2: should be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "text"), BROKEN)
def test_broken_entries_are_named(folder: Path, entry: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        load_conversations(write(folder, {"id": "first", "messages": [TURN]}, entry))


def test_broken_files_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match="no conversations"):
        load_conversations(write(folder, name="empty.jsonl").parent / "empty.jsonl", count=1)
    with pytest.raises(UserError, match="no such file"):
        load_conversations(folder / "none.jsonl")
    with pytest.raises(UserError, match=r"\.jsonl or \.json"):
        load_conversations(folder / "red.png")
    (folder / "bad.jsonl").write_text('{"messages": [\n')
    with pytest.raises(UserError, match=r"bad.jsonl:1: is not valid JSON"):
        load_conversations(folder / "bad.jsonl")
    (folder / "object.json").write_text("{}")
    with pytest.raises(UserError, match="list of conversations"):
        load_conversations(folder / "object.json")
    with pytest.raises(UserError, match="count = 0"):
        load_conversations(folder / "bad.jsonl", count=0)


def test_a_damaged_image_names_sample_and_file(folder: Path) -> None:
    sample = Conversation("x", (TURN,), (folder / "cut.png",), "data.jsonl:7")
    with pytest.raises(UserError, match=r"data.jsonl:7, sample 'x': image .*cut.png"):
        sample.load_images()


def test_content_hash_sees_everything_but_the_path(folder: Path) -> None:
    red = folder / "red.png"
    (folder / "copy.png").write_bytes(red.read_bytes())
    base = Conversation("x", (TURN,), (red,)).content_hash()
    assert Conversation("x", (TURN,), (folder / "copy.png",), "origin").content_hash() == base
    others = [
        Conversation("y", (TURN,), (red,)),
        Conversation("x", (TURN, TURN), (red,)),
        Conversation("x", (TURN,), (folder / "blue.png",)),
        Conversation("x", (TURN,), (Image.new("RGB", (8, 6), (255, 0, 0)),)),
        Conversation("x", (TURN,), (Image.new("RGB", (6, 8), (255, 0, 0)),)),
        Conversation("x", (TURN,)),
    ]
    assert len({base, *(other.content_hash() for other in others)}) == 1 + len(others)


def test_generated_conversations_are_chosen_by_name() -> None:
    first = load_conversations("embedded:train", 3, seed=1)
    assert [c.content_hash() for c in first] == [
        c.content_hash() for c in load_conversations("embedded:train", 3, seed=1)
    ]
    others = [("embedded:train", 2), ("embedded:test", 1)]
    for name, seed in others:
        made = load_conversations(name, 3, seed)
        assert not {c.content_hash() for c in made} & {c.content_hash() for c in first}
    assert all(len(c.load_images()) == 1 for c in first)
    assert split_of("embedded:score") == "score"
    assert split_of("data/train.jsonl") == ""
    with pytest.raises(UserError, match=r"embedded:tset.*did you mean 'embedded:test'"):
        load_conversations("embedded:tset", 3)
