"""Finished stages are kept, stale ones done again, killed ones continued."""

from pathlib import Path

import pytest

from dreams_nas.core.errors import UserError
from dreams_nas.pipeline.run_folder import RunFolder, Stage


class Recorder:
    """Builds stages that write a file and note that they ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: list[str] = []

    def stage(self, name: str, text: str, inputs: tuple[str, ...] = (), config: str = "c") -> Stage:
        output = self.folder / name

        def run() -> None:
            self.ran.append(name)
            output.write_text(text)

        return Stage(name, config, inputs, output, run)

    def run(self, *stages: Stage, force: bool = False) -> list[str]:
        self.ran.clear()
        RunFolder(self.folder, quiet=True).run(stages, force=force)
        return list(self.ran)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def test_finished_stages_are_not_recomputed(recorder: Recorder) -> None:
    stages = recorder.stage("a", "1"), recorder.stage("b", "2", ("a",))
    assert recorder.run(*stages) == ["a", "b"]
    assert recorder.run(*stages) == []
    assert recorder.run(*stages, force=True) == ["a", "b"]


def test_another_configuration_redoes_the_stage_and_what_reads_it(recorder: Recorder) -> None:
    first = recorder.stage("a", "1"), recorder.stage("b", "2", ("a",)), recorder.stage("x", "3")
    recorder.run(*first)
    second = recorder.stage("a", "other", config="d"), *first[1:]
    assert recorder.run(*second) == ["a", "b"]


def test_an_equal_artefact_spares_what_reads_it(recorder: Recorder) -> None:
    recorder.run(recorder.stage("a", "1"), recorder.stage("b", "2", ("a",)))
    changed = recorder.stage("a", "1", config="d"), recorder.stage("b", "2", ("a",))
    assert recorder.run(*changed) == ["a"]


def test_a_changed_or_lost_artefact_is_made_again(recorder: Recorder) -> None:
    stages = recorder.stage("a", "1"), recorder.stage("b", "2", ("a",))
    recorder.run(*stages)
    (recorder.folder / "b").unlink()
    assert recorder.run(*stages) == ["b"]
    (recorder.folder / "a").write_text("tampered")
    assert recorder.run(*stages) == ["a"]


def test_a_stage_that_died_is_run_again_and_those_before_it_are_kept(recorder: Recorder) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    stages = recorder.stage("a", "1"), recorder.stage("b", "2", ("a",))
    dying = Stage("b", "c", ("a",), recorder.folder / "b", die)
    with pytest.raises(KeyboardInterrupt):
        recorder.run(stages[0], dying)
    assert recorder.run(*stages) == ["b"]


def test_what_a_killed_stage_left_is_continued_only_by_an_equal_one(recorder: Recorder) -> None:
    left = recorder.folder / "b"

    def die() -> None:
        left.write_text("half")
        raise KeyboardInterrupt

    def look() -> None:
        found.append(left.read_text() if left.exists() else None)
        left.write_text("done")

    found: list[str | None] = []
    for config, expected in (("c", "half"), ("d", None)):
        with pytest.raises(KeyboardInterrupt):
            recorder.run(Stage("b", "c", (), left, die), force=True)
        recorder.run(Stage("b", config, (), left, look))
        assert found.pop() == expected


def test_seconds_are_kept_over_runs(recorder: Recorder) -> None:
    stage = recorder.stage("a", "1")
    recorder.run(stage)
    seconds = RunFolder(recorder.folder, quiet=True).seconds_by_stage
    assert list(seconds) == ["a"]
    recorder.run(stage)
    assert RunFolder(recorder.folder, quiet=True).seconds_by_stage == seconds


def test_a_broken_run_file_is_named(recorder: Recorder) -> None:
    (recorder.folder / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json"):
        recorder.run(recorder.stage("a", "1"))
