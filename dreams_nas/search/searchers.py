"""Searchers: which drafts of a space get evaluated, and in which order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dreams_nas.core.errors import UserError
from dreams_nas.search.objective import Evaluation, Objective
from dreams_nas.search.study import Study
from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.space.search_space import SearchSpace

ProgressCallback = Callable[[int, int, Evaluation], None]
"""Called after each evaluation with the number completed, the number planned, and the result."""


@dataclass(frozen=True)
class Problem:
    """What is searched."""

    space: SearchSpace
    """Legal drafts and policies."""
    dims: TargetDims
    """The target."""
    evaluate: Objective
    """Prices a draft."""


class Searcher(Protocol):
    """Evaluates drafts of a space into a study.

    Every searcher: evaluates only drafts of the space, each once, by its canonical key; goes on
    where the study stopped; ends with the same evaluations whether it was interrupted or not.
    """

    def search(
        self, problem: Problem, study: Study, progress: ProgressCallback | None = None
    ) -> list[Evaluation]:
        """Run until done; returns all completed evaluations of the study's drafts."""


class ExhaustiveSearcher:
    """Evaluates every draft of the space: the reference, up to some thousands of drafts."""

    def __init__(self, max_drafts: int = 5000) -> None:
        """Set the limit.

        Args:
            max_drafts: Larger spaces are refused before the first evaluation.
        """
        self._max_drafts = max_drafts

    def search(
        self, problem: Problem, study: Study, progress: ProgressCallback | None = None
    ) -> list[Evaluation]:
        """Evaluate what the study lacks.

        Raises:
            UserError: The space is too large, or the target cannot realise a choice.
        """
        archs = self._drafts(problem)
        num_done = sum(study.get(arch) is not None for arch in archs)
        for arch in archs:
            if study.get(arch) is not None:
                continue
            evaluation = problem.evaluate(arch)
            assert evaluation.arch == arch, "the objective evaluated another draft"
            study.add(evaluation)
            num_done += 1
            if progress is not None:
                progress(num_done, len(archs), evaluation)
        return study.evaluations(archs)

    def _drafts(self, problem: Problem) -> list[DraftArch]:
        problem.space.validate_for(problem.dims)
        archs = problem.space.enumerate(problem.dims)
        if len(archs) > self._max_drafts:
            raise UserError(
                f"the search space has {len(archs)} drafts, exhaustive search takes up to "
                f"{self._max_drafts}; narrow the space or raise max_drafts"
            )
        return archs
