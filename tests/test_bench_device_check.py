"""The check for GPUs, tried on a CPU; near-ties of the embedded target in every precision."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dreams_nas.bench.device_check import attention_ms, audit, main
from dreams_nas.core.device import Dtype
from dreams_nas.decode.parts import PART_NAMES
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.loading import load_target


def test_the_script_runs_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "check.json"
    monkeypatch.setattr(sys, "argv", ["check", "--device", "cpu", "--small", "--out", str(out)])
    main()
    found = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["audit"]["mismatched"] == 0
    assert found["audit"]["num_tokens_checked"] > 100
    for policy in found["rounds"].values():
        assert policy["never_waits"] is None
        for arm in ("eager", "captured"):
            assert policy[arm]["round_ms"] > 0
            assert set(policy[arm]["shares"]) == {*PART_NAMES, "rest"}
            assert policy[arm]["same_as_plain"]
    assert found["draft_step"]["bytes_over_bandwidth_ms"] < found["draft_step"]["eager_ms"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_embedded_target_differs_at_near_ties_only(dtype: Dtype) -> None:
    found = audit(load_target("embedded", "cpu", dtype), 3, 48)
    assert found["num_tokens_checked"] > 200
    assert found["mismatched"] == 0
    assert found["explained_near_ties"] <= 2


def test_an_audit_sees_a_wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HuggingFaceTarget._positions

    def wrong(self: Any, depths_Q: torch.Tensor, cache: Any) -> torch.Tensor:
        return right(self, depths_Q + 3 * (depths_Q > 1), cache)

    monkeypatch.setattr(HuggingFaceTarget, "_positions", wrong)
    assert audit(load_target("embedded", "cpu", "bfloat16"), 3, 48)["mismatched"] > 0


def test_both_ways_of_attention_agree() -> None:
    """Masked as a whole, or merged from an unmasked prefix and a masked tree."""
    for dims in ((4, 4, 16), (4, 2, 16)):
        found = attention_ms(dims, 5, 40, torch.device("cpu"), torch.float32)
        assert min(found.values()) > 0
