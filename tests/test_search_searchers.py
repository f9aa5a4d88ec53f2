"""Searchers and studies: the shared suite, completeness, and what a study refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_objective import IDENTITY, SPACE, fake_evaluation
from fake_tables import DIMS
from searcher_suite import Evaluator, SearcherSuite

from dreams_nas.core.errors import UserError
from dreams_nas.search.searchers import ExhaustiveSearcher, Problem
from dreams_nas.search.study import Study
from dreams_nas.space.search_space import SearchSpace


class TestExhaustiveSearcher(SearcherSuite):
    build = ExhaustiveSearcher

    def test_is_complete(self) -> None:
        found = self.run(Evaluator(), Study(IDENTITY))
        assert [e.arch for e in found] == SPACE.enumerate(DIMS)
        assert len(found) == SPACE.size == 16

    def test_equal_drafts_are_evaluated_once(self) -> None:
        dims = DIMS.replace(num_heads=2, num_kv_heads=1)
        evaluator = Evaluator()
        ExhaustiveSearcher().search(Problem(SPACE, dims, evaluator), Study(IDENTITY))
        assert len(evaluator.archs) == 8

    def test_refuses_a_space_that_is_too_large(self) -> None:
        problem = Problem(SPACE, DIMS, Evaluator())
        with pytest.raises(UserError, match="16 drafts, exhaustive search takes up to 10"):
            ExhaustiveSearcher(max_drafts=10).search(problem, Study(IDENTITY))


@pytest.mark.parametrize("name", ["space", "table", "supernet", "objective"])
def test_a_study_of_another_identity_is_refused_before_the_next_trial(
    tmp_path: Path, name: str
) -> None:
    Study(IDENTITY, tmp_path).add(fake_evaluation(SPACE.largest()))
    old = getattr(IDENTITY, name)
    with pytest.raises(UserError, match=f"begun with {name} = '{old}', now {name} = 'new'"):
        Study(IDENTITY.replace(**{name: "new"}), tmp_path)
    assert Study(IDENTITY, tmp_path).num_completed == 1


def test_changing_space_or_policy_changes_the_identity() -> None:
    wider = SPACE.policy.replace(levels=(0, 3))
    assert len({SPACE.hash, SearchSpace().hash, SPACE.replace(policy=wider).hash}) == 3


KILLED_SEARCH = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from fake_objective import IDENTITY, SPACE, fake_evaluation
from fake_tables import DIMS
from dreams_nas.search.searchers import ExhaustiveSearcher, Problem
from dreams_nas.search.study import Study

done = []
def evaluate(arch):
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(arch)
    return fake_evaluation(arch)

ExhaustiveSearcher().search(Problem(SPACE, DIMS, evaluate), Study(IDENTITY, sys.argv[1]))
"""


def test_a_search_killed_with_9_goes_on_and_needs_no_torch(
    tmp_path: Path, repository: Path
) -> None:
    check = "assert 'torch' not in sys.modules and 'pandas' not in sys.modules\n"
    script = KILLED_SEARCH.replace("done = []\n", f"{check}done = []\n")
    command = [sys.executable, "-c", script, str(tmp_path), str(repository / "tests")]
    killed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    study = Study(IDENTITY, tmp_path)
    assert study.num_completed == 3
    rest = Evaluator()
    found = ExhaustiveSearcher().search(Problem(SPACE, DIMS, rest), study)
    assert len(rest.archs) == 13
    assert found == [fake_evaluation(arch) for arch in SPACE.enumerate(DIMS)]


def test_half_a_trial_left_by_a_kill_is_not_read(tmp_path: Path) -> None:
    study = Study(IDENTITY, tmp_path)
    study.add(fake_evaluation(SPACE.largest()))
    (tmp_path / "trials" / ".tmp-00-1-aa-x.json").write_text('{"arch": ')
    assert Study(IDENTITY, tmp_path).num_completed == 1


def test_two_processes_may_write_one_study(tmp_path: Path) -> None:
    first, second = Study(IDENTITY, tmp_path), Study(IDENTITY, tmp_path)
    archs = SPACE.enumerate(DIMS)
    for arch in archs[:9]:
        first.add(fake_evaluation(arch))
    for arch in archs[7:]:
        second.add(fake_evaluation(arch))
    assert Study(IDENTITY, tmp_path).evaluations(archs) == [fake_evaluation(a) for a in archs]


def test_a_broken_trial_is_named(tmp_path: Path) -> None:
    Study(IDENTITY, tmp_path).add(fake_evaluation(SPACE.largest()))
    (path,) = (tmp_path / "trials").iterdir()
    path.write_text('{"arch": {}}')
    with pytest.raises(UserError, match=path.name):
        Study(IDENTITY, tmp_path)
