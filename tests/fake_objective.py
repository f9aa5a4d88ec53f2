"""Evaluations made of a formula with a planted optimum."""

from dreams_nas.latency.predict import SpeedupSummary
from dreams_nas.search.objective import Evaluation
from dreams_nas.search.study import StudyIdentity
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.space.tree import StaticTree

IDENTITY = StudyIdentity(space="s", table="t", supernet="n", objective="o")
SPACE = SearchSpace(tap=("last", "three"), depth=(1, 2), head_ratio=(0.5, 1.0), vocab=(0.25, 1.0))
PLANTED = DraftArch(tap="last", depth=2, head_ratio=0.5, vocab=0.25)
TREE = StaticTree.from_paths([(0,), (1,), (0, 0)])


def evaluation(
    arch: DraftArch,
    speedup: float,
    *,
    tree: StaticTree = TREE,
    acceptance_length: float = 2.0,
    round_ms: float = 7.0,
) -> Evaluation:
    """An evaluation with this predicted ratio of sums."""
    return Evaluation(
        arch=arch,
        tree=tree,
        acceptance_length=acceptance_length,
        speedup_predicted=SpeedupSummary(
            median=speedup + 0.01,
            p10=speedup - 0.2,
            p90=speedup + 0.3,
            ratio_of_sums=speedup,
            num_prompts=20,
        ),
        round_ms=round_ms,
        draft_prefill_ms=1.5,
        plain_ms=5.5,
        engines=("own",),
    )


def fake_evaluation(arch: DraftArch) -> Evaluation:
    """The more choices equal the planted draft's, the better; no two drafts tie."""
    weights = {"tap": 0.5, "depth": 0.25, "head_ratio": 0.125, "vocab": 0.0625}
    hits = sum(w for d, w in weights.items() if getattr(arch, d) == getattr(PLANTED, d))
    return evaluation(arch, 1.0 + hits, acceptance_length=2.0 + hits, round_ms=7.0 - hits)
