"""Weights and configuration of one folder belong together, whenever a save is killed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draft_models import build_draft
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from target_models import VOCAB, build_target

import dreams_nas.draft.checkpoint as checkpoint_module
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json, write_json
from dreams_nas.draft.model import DraftModel, load_draft
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree
from dreams_nas.supernet.checkpoint import (
    build_supernet,
    load_supernet,
    save_supernet,
    supernet_config,
)

ARCH = DraftArch(tap="last", depth=1, vocab=0.5, keep_ratio=0.5)


class Killed(Exception):
    """The process ends here."""


def draft_of(arch: DraftArch, seed: int = 0) -> DraftModel:
    return build_draft(build_target("llama"), arch, seed)


def kill_before(name: str, monkeypatch: pytest.MonkeyPatch, save: Callable[[], None]) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, name, die)
        with pytest.raises(Killed):
            save()


def test_a_kill_while_the_weights_are_written_leaves_the_old_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = draft_of(ARCH), draft_of(ARCH.replace(depth=2), seed=1)
    old.save(tmp_path)
    kill_before("save_file", monkeypatch, lambda: new.save(tmp_path))
    loaded = load_draft(tmp_path)
    assert loaded.config == old.config
    assert torch.equal(loaded.body.fc.to(old.body.fc.dtype), old.body.fc)


def test_a_kill_between_the_two_files_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have tensors of the same names and shapes: only the stamp can tell."""
    old, new = draft_of(ARCH), draft_of(ARCH.replace(keep_ratio=0.25), seed=1)
    old.save(tmp_path)
    kill_before("write_json", monkeypatch, lambda: new.save(tmp_path))
    with pytest.raises(UserError, match=r"another configuration.*run what wrote this draft again"):
        load_draft(tmp_path)
    new.save(tmp_path)
    assert load_draft(tmp_path).config == new.config


def test_choosing_a_tree_leaves_a_folder_that_loads_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(ARCH)
    draft.save(tmp_path)
    draft.config = draft.config.replace(policy=StaticTree.chain(3))
    for name in ("save_file", "write_json"):
        kill_before(name, monkeypatch, lambda: draft.save(tmp_path))
        assert load_draft(tmp_path).config.policy is None
    draft.save(tmp_path)
    assert load_draft(tmp_path).config.policy == StaticTree.chain(3)


def test_an_edited_tree_is_taken_but_no_other_edit(tmp_path: Path) -> None:
    draft_of(ARCH).save(tmp_path)
    path = tmp_path / "config.json"
    config = read_json(path)
    write_json(path, {**config, "policy": StaticTree.chain(2).model_dump(mode="json")})
    assert load_draft(tmp_path).config.policy == StaticTree.chain(2)
    write_json(path, {**config, "rms_norm_eps": 0.5})
    with pytest.raises(UserError, match="saved with another configuration"):
        load_draft(tmp_path)


def test_weights_of_other_tools_need_no_stamp(tmp_path: Path) -> None:
    draft = draft_of(ARCH)
    draft.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights), weights)
    assert load_draft(tmp_path).config == draft.config


def test_equal_checkpoints_are_equal_files(tmp_path: Path) -> None:
    """Several entries of metadata would come in an order that changes between processes."""
    draft_of(ARCH).save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert list(file.metadata()) == ["config_hash"]


def test_a_supernet_of_another_save_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build_target("llama")
    order = torch.arange(VOCAB)
    config = supernet_config(target, (1,), 1)
    other = config.replace(tap_layer_ids=(0,))
    save_supernet(tmp_path, build_supernet(config, target, order), config)
    assert load_supernet(tmp_path, target)[1] == config
    renamed = build_supernet(other, target, order, seed=1)
    kill_before("write_json", monkeypatch, lambda: save_supernet(tmp_path, renamed, other))
    with pytest.raises(UserError, match="run what wrote this supernet again"):
        load_supernet(tmp_path, target)
