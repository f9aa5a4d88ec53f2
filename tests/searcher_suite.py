"""What every searcher must do, whichever drafts it tries: one suite, inherited by each."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_objective import IDENTITY, PLANTED, SPACE, fake_evaluation
from fake_tables import DIMS

from dreams_nas.core.errors import UserError
from dreams_nas.search.objective import Evaluation
from dreams_nas.search.searchers import Problem, Searcher
from dreams_nas.search.study import Study
from dreams_nas.space.arch import DraftArch


class Killed(BaseException):
    """Stands for a kill: no handler of the searcher may swallow it."""


class Evaluator:
    """Counts evaluations, and dies in the one after `dies_after` completed ones."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.archs: list[DraftArch] = []
        self._dies_after = dies_after

    def __call__(self, arch: DraftArch) -> Evaluation:
        if self._dies_after is not None and len(self.archs) >= self._dies_after:
            raise Killed
        self.archs.append(arch)
        return fake_evaluation(arch)


class SearcherSuite:
    """Inherit it and set `build`."""

    build: Callable[[], Searcher]

    def run(self, evaluator: Evaluator, study: Study) -> list[Evaluation]:
        return type(self).build().search(Problem(SPACE, DIMS, evaluator), study)

    def test_finds_the_planted_winner(self) -> None:
        found = self.run(Evaluator(), Study(IDENTITY))
        assert max(found, key=lambda e: e.speedup).arch == PLANTED

    def test_evaluates_only_drafts_of_the_space_and_each_once(self) -> None:
        evaluator = Evaluator()
        found = self.run(evaluator, Study(IDENTITY))
        keys = [arch.key for arch in evaluator.archs]
        assert len(keys) == len(set(keys)) == len(found)
        assert all(SPACE.contains(arch) for arch in evaluator.archs)
        assert all(SPACE.canonical(arch, DIMS) == arch for arch in evaluator.archs)

    def test_is_repeatable(self) -> None:
        first, second = Evaluator(), Evaluator()
        assert self.run(first, Study(IDENTITY)) == self.run(second, Study(IDENTITY))
        assert first.archs == second.archs

    @pytest.mark.parametrize("dies_after", [0, 1, 5])
    def test_goes_on_where_it_was_killed(self, tmp_path: Path, dies_after: int) -> None:
        uninterrupted = self.run(Evaluator(), Study(IDENTITY))
        with pytest.raises(Killed):
            self.run(Evaluator(dies_after), Study(IDENTITY, tmp_path))
        study = Study(IDENTITY, tmp_path)
        assert study.num_completed == dies_after
        rest = Evaluator()
        assert self.run(rest, study) == uninterrupted
        assert len(rest.archs) == len(uninterrupted) - dies_after
        assert Study(IDENTITY, tmp_path).num_completed == len(uninterrupted)

    def test_a_finished_study_is_not_evaluated_again(self, tmp_path: Path) -> None:
        found = self.run(Evaluator(), Study(IDENTITY, tmp_path))
        again = Evaluator()
        assert self.run(again, Study(IDENTITY, tmp_path)) == found
        assert again.archs == []

    def test_reports_progress(self) -> None:
        calls: list[tuple[int, int, str]] = []
        type(self).build().search(
            Problem(SPACE, DIMS, Evaluator()),
            Study(IDENTITY),
            lambda done, total, evaluation: calls.append((done, total, evaluation.arch.key)),
        )
        assert [done for done, _, _ in calls] == list(range(1, len(calls) + 1))
        assert {total for _, total, _ in calls} == {len(calls)}

    def test_refuses_a_target_that_cannot_realise_a_choice(self) -> None:
        evaluator = Evaluator()
        problem = Problem(SPACE, DIMS.replace(num_layers=2), evaluator)
        with pytest.raises(UserError, match="tap = three"):
            type(self).build().search(problem, Study(IDENTITY))
        assert evaluator.archs == []
