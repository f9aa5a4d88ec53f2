"""Where an artefact came from: enough to make it again, nothing about who made it.

Paths of the machine are shortened to the working folder or to their last part, because artefacts
are published.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dreams_nas import __version__
from dreams_nas.core.device import Deployment
from dreams_nas.core.files import file_hash

SCHEMA_VERSION = 1
"""Of every artefact; raised when a reader of the old form would misread the new one."""

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "pandas",
    "optuna",
)


def provenance(
    command: str,
    config: BaseModel | Mapping[str, Any],
    seed: int | None = None,
    inputs: Mapping[str, Path | str] | None = None,
    deployment: Deployment | None = None,
) -> dict[str, Any]:
    """Describe how an artefact is being made, as plain JSON data.

    Args:
        command: The verb, e.g. "collect".
        config: The resolved config.
        seed: Root seed of the run.
        inputs: What was read, by name: a path, of which the content's hash is recorded, or a hash.
        deployment: What it was measured on or made for, if that matters.
    """
    values = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "command_line": command_line(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "config": without_machine_paths(values),
        "seed": seed,
        "inputs": {
            name: file_hash(source) if isinstance(source, Path) else source
            for name, source in (inputs or {}).items()
        },
        "deployment": None if deployment is None else deployment.model_dump(mode="json"),
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def package_versions() -> dict[str, str | None]:
    """Return the versions of our own and of the packages that change results; None if missing."""
    versions: dict[str, str | None] = {"dreams-nas": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def command_line(argv: Sequence[str] | None = None) -> str:
    """Return the command as typed, the program by its name and paths shortened."""
    program, *arguments = list(sys.argv if argv is None else argv) or ["python"]
    return " ".join([Path(program).name, *(_shorten(argument) for argument in arguments)])


def without_machine_paths(value: Any) -> Any:
    """Return plain data in which every text that is an absolute path is shortened."""
    if isinstance(value, Mapping):
        return {key: without_machine_paths(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_machine_paths(inner) for inner in value]
    if isinstance(value, Path):
        return _shorten(value.as_posix())
    return _shorten(value) if isinstance(value, str) else value


def _shorten(text: str) -> str:
    """Shorten PATH, key=PATH or --key=PATH when PATH is absolute or in a home folder."""
    key, equals, tail = text.rpartition("=")
    if not tail.startswith(("/", "~")):
        return text
    folder = Path.cwd().as_posix()
    if tail == folder or tail.startswith(f"{folder}/"):
        tail = os.path.relpath(tail, folder)
    else:
        tail = f".../{Path(tail).name}"
    return f"{key}{equals}{tail}"
