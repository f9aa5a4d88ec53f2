"""A run folder: what each stage was made from, what is finished, what is stale.

`run.json` holds for every finished stage the hash of its configuration, the hashes of the artefacts
it read and the hash of what it wrote. A stage whose configuration or inputs differ from those is
stale and is done again, from nothing; one that was killed has no entry and, started with the same
configuration and inputs, goes on where its own artefact lets it.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.console import say
from dreams_nas.core.files import file_hash, hash_json, read_json, write_json

RUN_FILE = "run.json"


class StageRecord(Config):
    """One finished stage."""

    config_hash: str
    """Hash of the configuration that changes its result."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Hash of every artefact it read, by stage."""
    output: str
    """Hash of the artefact it wrote."""
    seconds: float = Field(ge=0)
    """Wall time of the run that finished it."""
    finished: str
    """When, UTC."""


class RunState(Config):
    """`run.json`."""

    schema_version: int = 1
    """Format of the file."""
    stages: dict[str, StageRecord] = Field(default_factory=dict)
    """Finished stages by name, in the order they finished."""
    started: dict[str, str] = Field(default_factory=dict)
    """Hash of configuration and inputs that a stage was last started with: what a killed one has
    left is continued only by an equal one."""


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline."""

    name: str
    config_hash: str
    """Hash of the configuration that changes its result."""
    inputs: tuple[str, ...]
    """Stages whose artefacts it reads."""
    output: Path
    """File or folder it writes."""
    run: Callable[[], None]
    """Does it; a second call after a kill goes on from what the first one left."""
    hash_output: Callable[[Path], str] = file_hash
    """What identifies its artefact: for a table the hash that leaves the date out."""


class RunFolder:
    """Runs stages in order and remembers what is done."""

    def __init__(self, folder: Path, quiet: bool = False) -> None:
        """Open a run folder, new or begun before.

        Raises:
            UserError: Its `run.json` is broken or of another format.
        """
        self._path = folder / RUN_FILE
        self._quiet = quiet
        state: dict[str, Any] = read_json(self._path) if self._path.is_file() else {}
        self.state = build_config(RunState, state, str(self._path))

    def run(self, stages: Sequence[Stage], *, force: bool = False) -> None:
        """Bring every stage up to date.

        Args:
            stages: In an order in which every stage comes after its inputs.
            force: Redo all of them, finished or not.
        """
        for stage in stages:
            if not force and self.is_fresh(stage):
                say(f"{stage.name}: finished before, kept", self._quiet)
                continue
            say(f"{stage.name}: started", self._quiet)
            self._start(stage, anew=force)
            start = time.perf_counter()
            stage.run()
            seconds = time.perf_counter() - start
            self._finish(stage, seconds)
            say(f"{stage.name}: {seconds:.1f} s", self._quiet)

    def is_fresh(self, stage: Stage) -> bool:
        """Whether a finished stage still stands for its configuration, inputs and artefact."""
        record = self.state.stages.get(stage.name)
        return (
            record is not None
            and record.config_hash == stage.config_hash
            and record.inputs == self._input_hashes(stage)
            and stage.output.exists()
            and record.output == stage.hash_output(stage.output)
        )

    @property
    def seconds_by_stage(self) -> dict[str, float]:
        """Wall time of each finished stage."""
        return {name: record.seconds for name, record in self.state.stages.items()}

    def _input_hashes(self, stage: Stage) -> dict[str, str]:
        done = self.state.stages
        return {name: done[name].output for name in stage.inputs if name in done}

    def _start(self, stage: Stage, anew: bool) -> None:
        """Note what the stage is started with; delete what was left by one started otherwise."""
        key = hash_json([stage.config_hash, self._input_hashes(stage)])
        if anew or self.state.started.get(stage.name) != key:
            remove_artefact(stage.output)
        self.forget([stage.name])
        self._save(self.state.replace(started={**self.state.started, stage.name: key}))

    def forget(self, names: Sequence[str]) -> None:
        """Take stages off the record."""
        kept = {name: r for name, r in self.state.stages.items() if name not in names}
        self._save(self.state.replace(stages=kept))

    def _finish(self, stage: Stage, seconds: float) -> None:
        record = StageRecord(
            config_hash=stage.config_hash,
            inputs=self._input_hashes(stage),
            output=stage.hash_output(stage.output),
            seconds=seconds,
            finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        self._save(self.state.replace(stages={**self.state.stages, stage.name: record}))

    def _save(self, state: RunState) -> None:
        self.state = state
        write_json(self._path, state.model_dump(mode="json"))


def remove_artefact(path: Path) -> None:
    """Delete what a stage wrote, a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
