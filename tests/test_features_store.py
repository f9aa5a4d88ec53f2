"""A feature store: what goes in comes out; its key; kills, full disks, samples left out."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_data import TEMPLATE, build_llava, conversation, conversations
from PIL import Image
from target_models import IMAGE_TOKEN

from dreams_nas.core.errors import RunError, UserError
from dreams_nas.core.files import read_json
from dreams_nas.features import collect as collect_module
from dreams_nas.features import recorder, shards, store
from dreams_nas.features.collect import collect
from dreams_nas.features.config import CollectConfig
from dreams_nas.features.conversations import Conversation
from dreams_nas.features.key import store_key
from dreams_nas.features.store import FeatureStore, load_features
from dreams_nas.targets.huggingface import HuggingFaceTarget

CONFIG = CollectConfig(taps=("last", "0.25"), max_new_tokens=6, shard_size=4, batch_tokens=120)


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return build_llava(torch.float64)


def make(target: HuggingFaceTarget, folder: Path, count: int = 10, **changes: Any) -> FeatureStore:
    config = CONFIG.replace(**changes)
    return collect(target, conversations(count), config, folder, split="train", quiet=True)


def forbid_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a pass of the target, although everything is there")

    monkeypatch.setattr(recorder, "generate_answers", refuse)


def same(one: FeatureStore, other: FeatureStore) -> bool:
    return [r.id for r in one] == [r.id for r in other] and all(
        torch.equal(a.tokens_T, b.tokens_T) and torch.allclose(a.features_TF, b.features_TF)
        for a, b in zip(one, other, strict=True)
    )


def test_what_goes_in_comes_out(target: HuggingFaceTarget, tmp_path: Path) -> None:
    found = make(target, tmp_path)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 3
    assert [recording.id for recording in found] == [f"c{n}" for n in range(10)]
    assert (found.split, found.target, found.target_layer_ids) == ("train", target.spec, (0, 1))
    for index, sample in enumerate(conversations(10)):
        recording, entry = found[index], found.entries[index]
        prompt = target.prepare(sample.messages, sample.load_images())
        stop = recording.prompt_length
        assert recording.tokens_T[:stop].tolist() == prompt.input_ids_T.tolist()
        assert torch.equal(recording.tokens_T[stop:], found.answer(index))
        assert recording.num_answer_tokens == 6
        assert recording.image_spans == prompt.image_spans == entry.image_spans
        assert recording.features_TF.shape == (entry.num_tokens, 64)
        assert len(recording.importance_M) == len(recording.image_embeddings_MD)
        assert len(recording.importance_M) == entry.num_image_tokens == 9 * len(sample.images)
        # The row before the first answer token gives that token, and so on to the last.
        logits = target.head(recording.features((1,)))[stop - 1 : -1]
        assert torch.equal(logits.argmax(-1), recording.tokens_T[stop:])
    assert [r.id for r in found[2:4]] == ["c2", "c3"]
    assert found[-1].id == "c9"
    manifest = found.manifest
    assert manifest.num_answer_tokens == 60
    assert manifest.num_prompt_tokens == sum(e.prompt_length for e in found.entries)
    assert manifest.num_bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert manifest.provenance["command"] == "collect"


def test_recordings_are_read_lazily(
    target: HuggingFaceTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(target, tmp_path)
    opened: list[int] = []
    plain = shards.open_shard
    monkeypatch.setattr(store, "open_shard", lambda f, n: opened.append(n) or plain(f, n))
    monkeypatch.setattr(store, "_MAX_OPEN_SHARDS", 2)
    found = load_features(tmp_path)
    assert (len(found), len(found.entries), opened) == (10, 10, [])
    first = found[0]
    assert found[0].features_TF.data_ptr() == first.features_TF.data_ptr()
    assert len(opened) == 1
    copy = first.features_TF.clone()
    assert sum(recording.num_answer_tokens for recording in found) == 60
    assert len(found._opened) == 2
    assert torch.equal(first.features_TF, copy)


def test_precision_on_disk_is_a_choice(target: HuggingFaceTarget, tmp_path: Path) -> None:
    exact = make(target, tmp_path / "exact", 3)
    half = make(target, tmp_path / "half", 3, store_dtype="bfloat16")
    assert (exact.manifest.dtype, half.manifest.dtype) == ("float64", "bfloat16")
    assert torch.equal(half[1].features_TF, exact[1].features_TF.bfloat16())
    assert half[0].image_embeddings_MD.dtype == torch.bfloat16
    assert torch.equal(half[0].importance_M, exact[0].importance_M)


def test_a_second_call_makes_no_pass(
    target: HuggingFaceTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(target, tmp_path)
    forbid_passes(monkeypatch)
    assert same(make(target, tmp_path), first)
    # Sizes of batches and shards change nothing that is recorded.
    assert same(make(target, tmp_path, shard_size=3, batch_tokens=9999), first)


def other_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "layers.1.mlp.up_proj" in n).mul_(1.01)


KEY_CHANGES: dict[str, Any] = {
    "weights": lambda: (build_llava(torch.float64), other_weights),
    "template": lambda: (build_llava(torch.float64), None),
    "processor": lambda: (build_llava(torch.float64, image_mean=[0.5, 0.5, 0.5]), None),
    "dtype": lambda: (build_llava(torch.float32), None),
    "eos_token_ids": lambda: (build_llava(torch.float64), None),
}


@pytest.mark.parametrize("field", KEY_CHANGES)
def test_another_target_misses(field: str, target: HuggingFaceTarget) -> None:
    other, change = KEY_CHANGES[field]()
    if change is not None:
        change(other.model)
    if field == "template":
        other.processor.chat_template = TEMPLATE.replace("answer :", "answer")
    if field == "eos_token_ids":
        other.spec = other.spec.replace(eos_token_ids=(2, 5))
    samples = conversations(2)
    old, new = store_key(target, samples, CONFIG), store_key(other, samples, CONFIG)
    differing = {name for name in old if old[name] != new[name]}
    if field == "dtype":
        differing -= {"store_dtype", "weights"}
    assert differing == {field}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("target_layer_ids", {"taps": ("last",)}),
        ("max_length", {"max_length": 100}),
        ("max_new_tokens", {"max_new_tokens": 7}),
        ("store_dtype", {"store_dtype": "float16"}),
    ],
)
def test_another_setting_misses(
    field: str, changes: dict[str, Any], target: HuggingFaceTarget
) -> None:
    samples = conversations(2)
    old = store_key(target, samples, CONFIG)
    new = store_key(target, samples, CONFIG.replace(**changes))
    assert {name for name in old if old[name] != new[name]} == {field}


def test_other_conversations_miss_and_equal_ones_hit(target: HuggingFaceTarget) -> None:
    samples = conversations(3)
    key = store_key(target, samples, CONFIG)
    assert store_key(build_llava(torch.float64), conversations(3), CONFIG) == key
    renamed = Conversation("other", samples[0].messages, samples[0].images)
    painted = Conversation("c0", samples[0].messages, (Image.new("RGB", (16, 16)),))
    for changed in ([renamed, *samples[1:]], [painted, *samples[1:]], samples[:2], samples[::-1]):
        new = store_key(target, changed, CONFIG)
        assert {name for name in key if key[name] != new[name]} == {"conversations"}


def test_another_store_is_replaced_only_when_asked(
    target: HuggingFaceTarget, tmp_path: Path
) -> None:
    make(target, tmp_path)
    with pytest.raises(UserError, match=r"max_new_tokens: 6 against 7.*--force"):
        make(target, tmp_path, max_new_tokens=7)
    assert len(load_features(tmp_path)) == 10
    config = CONFIG.replace(max_new_tokens=7)
    found = collect(target, conversations(3), config, tmp_path, overwrite=True, quiet=True)
    assert [recording.num_answer_tokens for recording in found] == [7, 7, 7]
    assert len(list(tmp_path.glob("shard-*"))) == 2


def test_a_killed_run_goes_on_where_it_stopped(
    target: HuggingFaceTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(target, tmp_path / "whole")
    folder = tmp_path / "killed"
    child = os.fork()
    if child == 0:
        plain = shards.save_file

        def die(tensors: Any, path: Path) -> None:
            plain(tensors, path)
            if "shard-00001" in path.name:
                os.kill(os.getpid(), signal.SIGKILL)

        shards.save_file = die
        make(target, folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    with pytest.raises(UserError, match="not finished"):
        load_features(folder)
    first = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    made: list[int] = []
    plain_save = collect_module.save_shard
    monkeypatch.setattr(
        collect_module, "save_shard", lambda *a: made.append(a[1]) or plain_save(*a)
    )
    assert same(make(target, folder), whole)
    assert made == [1, 2]
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == first
    assert not list(folder.glob(".tmp-*"))


def test_a_full_disk_leaves_whole_shards(
    target: HuggingFaceTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plain = shards.save_file

        def fill(tensors: Any, path: Path) -> None:
            if "shard-00002" in path.name:
                raise OSError(28, "No space left on device")
            plain(tensors, path)

        patch.setattr(shards, "save_file", fill)
        with pytest.raises(RunError, match="the disk is full"):
            make(target, tmp_path)
    assert [shards.load_index(tmp_path, n) is not None for n in range(3)] == [True, True, False]
    assert same(make(target, tmp_path), make(target, tmp_path / "again"))


def test_too_little_disk_is_refused_before_any_pass(
    target: HuggingFaceTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forbid_passes(monkeypatch)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"the feature store needs .* kB, but only 1.0 kB"):
        collect(target, conversations(4), CONFIG, tmp_path)
    assert "4 prompts, layers [0, 1] in float64: at most" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_printed_size_is_an_upper_bound(
    target: HuggingFaceTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(collect_module, "check_free_space", lambda f, n, w: needed.append(n))
    found = make(target, tmp_path)
    assert 0.7 * needed[0] < found.manifest.num_bytes <= needed[0]


def test_prompts_that_do_not_fit_are_counted_and_never_cut(
    target: HuggingFaceTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [conversation(0), conversation(1, num_images=2, num_words=30), conversation(2)]
    config = CONFIG.replace(max_length=48)
    found = collect(target, samples, config, tmp_path)
    assert [recording.id for recording in found] == ["c0", "c2"]
    [skipped] = found.manifest.skipped
    # 18 image tokens, 30 words, 4 of the template and 6 of the answer.
    assert (skipped.id, skipped.needed_tokens, skipped.limit_tokens) == ("c1", 58, 48)
    assert "first 'c1' (58 tokens with its answer, limit 48)" in capsys.readouterr().err
    exact = collect(target, samples, CONFIG.replace(max_length=58), tmp_path / "b", quiet=True)
    assert len(exact) == 3
    with pytest.raises(RunError, match=r"none of the 1 prompts fits.*'c1'.*58 tokens.*is 48"):
        collect(target, samples[1:2], config, tmp_path / "c", quiet=True)
    assert not (tmp_path / "c").exists()


def test_a_prompt_longer_than_the_positions_is_skipped_too(
    target: HuggingFaceTarget, tmp_path: Path
) -> None:
    samples = [conversation(0), conversation(1, num_words=600)]
    found = collect(target, samples, CONFIG, tmp_path, quiet=True)
    assert [(s.id, s.limit_tokens) for s in found.manifest.skipped] == [("c1", 512)]


def test_empty_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    target = build_llava(torch.float64)
    first = int(make(target, tmp_path / "plain", 1)[0].tokens_T[-6])
    target.spec = target.spec.replace(eos_token_ids=(first,))
    found = make(target, tmp_path / "ends")
    reasons = {skipped.id: skipped.reason for skipped in found.manifest.skipped}
    assert reasons["c0"] == "the answer is empty"
    assert len(found) + len(reasons) == 10
    assert not reasons.keys() & {recording.id for recording in found}
    for recording in found:
        answer = recording.tokens_T[recording.prompt_length :].tolist()
        assert first not in answer[:-1]
        assert len(answer) == 6 or answer[-1] == first
    with pytest.raises(RunError, match="none of the 1 answers has a token"):
        make(target, tmp_path / "none", 1)


def test_answers_with_image_tokens_are_dropped(tmp_path: Path) -> None:
    target = build_llava(torch.float64)
    weight = target.model.lm_head.weight
    weight.data[IMAGE_TOKEN] = 0
    # The image token wins wherever the last token of the first answer would have.
    token = make(target, tmp_path / "a", 1)[0].tokens_T[-1]
    weight.data[IMAGE_TOKEN] = 1.001 * weight.data[token]
    found = make(target, tmp_path / "b")
    dropped = [s for s in found.manifest.skipped if "stands for an image" in s.reason]
    assert "c0" in {skipped.id for skipped in dropped}
    assert len(found) + len(dropped) == 10
    assert all(IMAGE_TOKEN not in found.answer(index).tolist() for index in range(len(found)))


def test_bad_input_is_refused(target: HuggingFaceTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data set is empty"):
        collect(target, [], CONFIG, tmp_path, quiet=True)
    with pytest.raises(UserError, match=r"'c0'.*taken"):
        collect(target, [conversation(0), conversation(0)], CONFIG, tmp_path, quiet=True)
    with pytest.raises(UserError, match=r"tap 'three'.*must differ"):
        make(target, tmp_path, taps=("three",))
    with pytest.raises(UserError, match="holds no feature store"):
        load_features(tmp_path)


def test_damaged_shards_are_noticed_and_made_again(
    target: HuggingFaceTarget, tmp_path: Path
) -> None:
    whole = make(target, tmp_path)
    kept = [(r.tokens_T.clone(), r.features_TF.clone()) for r in whole]
    path = tmp_path / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="shard 1 of 3 is missing, damaged"):
        load_features(tmp_path)
    again = make(target, tmp_path)
    for (tokens_T, features_TF), recording in zip(kept, again, strict=True):
        assert torch.equal(tokens_T, recording.tokens_T)
        torch.testing.assert_close(features_TF, recording.features_TF)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest.json: is not valid JSON"):
        load_features(tmp_path)


def test_a_store_belongs_to_its_target(target: HuggingFaceTarget, tmp_path: Path) -> None:
    found = make(target, tmp_path, 1)
    found.require_target(target.spec)
    with pytest.raises(UserError, match="embedding_hash"):
        found.require_target(build_llava(seed=1).spec)
    assert read_json(tmp_path / "manifest.json")["target"]["name"] == target.spec.name
