"""An export in our own format: it loads as it was, its card is true, damage is noticed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import ARCH, with_policy
from draft_models import TREES, build_draft, build_loud_target
from safetensors.torch import load_file, save_file

from dreams_nas.core.errors import RunError, UserError
from dreams_nas.draft.model import DraftModel, load_draft
from dreams_nas.export.card import model_card
from dreams_nas.export.config import ExportConfig
from dreams_nas.export.own import check_export, export, save_export
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree


@pytest.fixture
def draft() -> DraftModel:
    target = build_loud_target("llava", dtype=torch.float32)
    return with_policy(build_draft(target, ARCH), TREES["bushy"])


def bench_of(draft: DraftModel, predicted: Any = None) -> dict[str, Any]:
    """A bench.json, as far as the card reads it."""
    plain = {"arch": None, "policy": StaticTree().describe(), "speedup_predicted": None}
    assert draft.config.policy is not None
    winner = {
        "arch": draft.config.arch.model_dump(mode="json"),
        "policy": draft.config.policy.describe(),
        "speedup_predicted": predicted,
    }
    return {
        "schema_version": "dreams-nas/bench/1",
        "summary": {"arms": {"plain": plain, "winner": winner}},
        "conditions": ["A CPU, float32", "greedy; 50 prompts"],
        "definitions": ["tau: tokens / rounds", "speedup predicted: from the table"],
        "findings": ["Lossless: 0 mismatched tokens."],
        "table": {
            "headers": ["arm", "speedup measured", "speedup predicted"],
            "rows": [["plain", 1.0, None], ["winner", 1.875, 2.125]],
        },
    }


def test_an_export_holds_four_files_and_loads_equal(draft: DraftModel, tmp_path: Path) -> None:
    draft.save(tmp_path / "draft")
    config = ExportConfig(draft=str(tmp_path / "draft"), out=str(tmp_path / "export"))
    assert export(config) == draft.config
    names = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "provenance.json"]
    loaded = load_draft(tmp_path / "export")
    assert loaded.config == draft.config
    source, stored = draft.to_tensors(), loaded.to_tensors()
    assert set(source) == set(stored)
    for name, tensor in source.items():
        assert torch.equal(tensor, stored[name]), name
    origin = json.loads((tmp_path / "export" / "provenance.json").read_text())
    assert origin["command"] == "export"
    assert set(origin["inputs"]) == {"draft"}
    assert str(tmp_path) not in json.dumps(origin)


def test_an_export_replaces_an_export_but_nothing_else(draft: DraftModel, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    save_export(draft, folder, {"run": 1})
    save_export(draft, folder, {"run": 2})
    assert json.loads((folder / "provenance.json").read_text()) == {"run": 2}
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="holds other files"):
        save_export(draft, other, {})
    draft.save(tmp_path / "draft")
    with pytest.raises(UserError, match="no export wrote"):
        save_export(draft, tmp_path / "draft", {})


@pytest.mark.parametrize("damage", ["value", "missing", "additional", "config", "shape"])
def test_damage_is_noticed(draft: DraftModel, tmp_path: Path, damage: str) -> None:
    draft.save(tmp_path)
    check_export(draft, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if damage == "value":
        tensors["norm.weight"][3] += 1e-6
    elif damage == "missing":
        del tensors["norm.weight"]
    elif damage == "additional":
        tensors["lm_head.weight"] = torch.zeros(2)
    elif damage == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        config["target_name"] = "another"
        (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)
    with pytest.raises(RunError, match="read"):
        check_export(draft, tmp_path)


def test_a_failed_check_leaves_the_older_export(
    draft: DraftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "export"
    save_export(draft, folder, {"run": 1})

    def save_wrong(self: DraftModel, path: Path) -> None:
        original(self, path)
        tensors = load_file(path / "model.safetensors")
        tensors["norm.weight"] *= 2
        save_file(tensors, path / "model.safetensors")

    original = DraftModel.save
    monkeypatch.setattr(DraftModel, "save", save_wrong)
    with pytest.raises(RunError, match=r"tensor 'norm\.weight' does not read back equal"):
        save_export(draft, folder, {"run": 2})
    assert json.loads((folder / "provenance.json").read_text()) == {"run": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_the_card_states_architecture_target_and_policy(draft: DraftModel) -> None:
    card = model_card(draft.config)
    config = draft.config
    for fact in (
        config.arch.key,
        config.target_name,
        config.tokenizer_hash,
        config.embedding_hash,
        "blocks 1 (counted from 0, of 2; tap `last`)",
        "2 query heads on 1 key/value heads of size 8, 32 feed-forward channels",
        "25 % of the image tokens",
        "49 of 97 tokens",
        "static tree, 4 levels, 17 nodes (verification takes 18 rows)",
        "Nothing was measured",
    ):
        assert fact in card, fact


def test_the_cards_python_loads_the_draft(
    draft: DraftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_export(draft, tmp_path / "export", {})
    monkeypatch.chdir(tmp_path / "export")
    code = re.search(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    assert code is not None
    assert len(code[1].strip().splitlines()) == 3
    scope: dict[str, Any] = {}
    exec(code[1], scope)
    assert scope["draft"].config == draft.config


def test_measured_and_predicted_stand_apart_in_the_card(draft: DraftModel) -> None:
    predicted = {"median": 2.125, "p10": 2.0, "p90": 2.25}
    card = model_card(draft.config, bench_of(draft, predicted))
    measured, _, rest = card.partition("## Predicted")
    assert "| winner | 1.875 |" in measured
    assert "2.125" not in measured
    assert "median 2.12, p10 2.00, p90 2.25" in rest
    assert measured.index("50 prompts") < measured.index("| arm |") < measured.index("tau: ")
    assert "No speedup was predicted" in model_card(draft.config, bench_of(draft))


def test_a_bench_of_another_draft_is_refused(draft: DraftModel) -> None:
    bench = bench_of(draft)
    with pytest.raises(UserError, match="no arm of this bench"):
        model_card(draft.config.replace(policy=TREES["chain"]), bench)
    with pytest.raises(UserError, match="no arm of this bench"):
        model_card(draft.config.replace(arch=ARCH.replace(vocab=0.25)), bench)


@pytest.mark.parametrize(
    ("arch", "tree", "said"),
    [
        (ARCH, "chain", "not, because it drops image tokens and it reads the output of the last"),
        (DraftArch(tap="last"), "chain", "not, because it reads the output of the last block"),
        (DraftArch(tap="0.5"), "chain", "vLLM: the architecture and the policy fit"),
        (DraftArch(tap="0.5"), "bushy", "vLLM: the architecture fits, as a chain only"),
        (DraftArch(tap="0.5"), "bushy", "SGLang: the architecture and the policy fit"),
    ],
)
def test_the_card_says_where_the_draft_can_be_served(
    draft: DraftModel, arch: DraftArch, tree: str, said: str
) -> None:
    card = model_card(draft.config.replace(arch=arch, policy=TREES[tree]))
    assert said in card
    assert "dreams-nas: as it is" in card


def test_wrong_input_is_refused(draft: DraftModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown export format 'vllm'; choices: dreams-nas"):
        export(ExportConfig(draft=str(tmp_path), format="vllm"))
    with pytest.raises(UserError, match="give --draft DIR"):
        export(ExportConfig())
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        export(ExportConfig(draft=str(tmp_path / "none"), out=str(tmp_path / "export")))
    draft.save(tmp_path / "draft")
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(UserError, match=r"is no bench\.json"):
        export(
            ExportConfig(
                draft=str(tmp_path / "draft"),
                bench=str(tmp_path),
                out=str(tmp_path / "export"),
            )
        )
    assert not (tmp_path / "export").exists()
