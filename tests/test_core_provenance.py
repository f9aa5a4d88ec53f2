"""Provenance: what made an artefact, and nothing about whose machine it was."""

import getpass
import platform
from pathlib import Path

import pytest

from dreams_nas import __version__
from dreams_nas.core.config import Config
from dreams_nas.core.device import Deployment
from dreams_nas.core.files import file_hash, to_json
from dreams_nas.core.provenance import (
    SCHEMA_VERSION,
    command_line,
    package_versions,
    provenance,
)


class Collect(Config):
    """A config with paths."""

    target: str = "embedded"
    """Target."""
    data: Path | None = None
    """Conversations."""


def test_provenance_holds_what_it_takes_to_make_it_again(tmp_path: Path) -> None:
    source = tmp_path / "data.csv"
    source.write_text("a,b\n")
    deployment = Deployment(device="cpu", device_name="Abacus")
    record = provenance(
        "collect", Collect(), 7, {"data": source, "target": "0123abcd"}, deployment=deployment
    )
    assert record["schema_version"] == SCHEMA_VERSION
    assert record["command"] == "collect"
    assert record["config"] == {"target": "embedded", "data": None}
    assert record["seed"] == 7
    assert record["inputs"] == {"data": file_hash(source), "target": "0123abcd"}
    assert record["deployment"]["device_name"] == "Abacus"
    assert record["python"] == platform.python_version()
    assert record["packages"]["dreams-nas"] == __version__
    assert record["date"].endswith("Z")


def test_no_path_of_the_machine_gets_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "someone"
    (home / "project").mkdir(parents=True)
    monkeypatch.chdir(home / "project")
    argv = [
        str(home / ".venv/bin/dreams-nas"),
        "collect",
        f"--out={home}/project/runs/1",
        "--set",
        f"data={home}/secret/chats.json",
        "~/models/big",
        "--dtype=float32",
    ]
    monkeypatch.setattr("sys.argv", argv)
    record = provenance(
        "collect", {"data": home / "a.json", "list": [f"{home}/b", "plain/text"], "n": 1}
    )
    assert record["command_line"] == (
        "dreams-nas collect --out=runs/1 --set data=.../chats.json .../big --dtype=float32"
    )
    assert record["config"] == {"data": ".../a.json", "list": [".../b", "plain/text"], "n": 1}
    text = to_json(record)
    assert "someone" not in text
    assert f"/{getpass.getuser()}/" not in text


def test_command_line_without_arguments() -> None:
    assert command_line(["/usr/bin/dreams-nas"]) == "dreams-nas"
    assert command_line([]) == "python"


def test_versions_of_what_changes_results_are_recorded() -> None:
    versions = package_versions()
    assert {"torch", "transformers", "numpy", "optuna"} <= set(versions)
    assert all(version for version in versions.values())
