"""The objective: one draft with its best policy inside, priced by replay and table. No target."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from dreams_nas.core.config import Config
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.predict import SpeedupSummary, predict_speedup
from dreams_nas.latency.table import LatencyTable
from dreams_nas.search.trees import choose_tree
from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.space.rank_paths import RankPaths
from dreams_nas.space.search_space import PolicySpace
from dreams_nas.space.servable import Engine, serving_engines
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import walk


class Evaluation(Config):
    """What a search knows of one draft. Everything here is predicted, nothing measured."""

    arch: DraftArch
    """The draft."""
    tree: StaticTree
    """Its best policy; without nodes: do not speculate."""
    acceptance_length: float
    """tau on the *score* prompts, tokens per verify round; 1 without speculation."""
    speedup_predicted: SpeedupSummary
    """On the *score* prompts."""
    round_ms: float
    """Mean predicted round, milliseconds; a plain step without speculation."""
    draft_prefill_ms: float
    """Mean predicted draft prefill, milliseconds; 0 without speculation."""
    plain_ms: float
    """Mean predicted plain step, milliseconds."""
    engines: tuple[Engine, ...]
    """Where draft and policy can be served."""

    @property
    def speedup(self) -> float:
        """What search maximises: the predicted ratio of sums."""
        return self.speedup_predicted.ratio_of_sums

    @property
    def speculates(self) -> bool:
        """Whether its policy drafts at all."""
        return bool(self.tree.paths)


class Objective(Protocol):
    """Turns a draft into its evaluation; equal drafts give equal evaluations."""

    def __call__(self, arch: DraftArch) -> Evaluation:
        """Evaluate one draft with its best policy inside."""


class SplitRankPaths(NamedTuple):
    """A draft's rank paths on two splits, so that no tree is scored where it was chosen."""

    choose: RankPaths
    """Prompts on which trees are chosen."""
    score: RankPaths
    """Prompts on which they are scored."""


class TableObjective:
    """Prices drafts by a latency table and their replayed rank paths."""

    def __init__(
        self,
        table: LatencyTable,
        dims: TargetDims,
        policy: PolicySpace,
        replay: Callable[[DraftArch], SplitRankPaths],
    ) -> None:
        """Keep what an evaluation needs.

        Args:
            table: Of the deployment that is searched for; the caller has checked that it matches.
            dims: The target.
            policy: Policies to choose from inside each draft.
            replay: Replays a draft. Drafts come body by body: those that follow one another and
                have one `body_key` differ in vocabulary alone.
        """
        self._table = table
        self._dims = dims
        self._policy = policy
        self._replay = replay

    def __call__(self, arch: DraftArch) -> Evaluation:
        """Choose the tree on the *choose* prompts, score it on the *score* prompts."""
        return self.evaluate(arch, self._policy)

    def evaluate(self, arch: DraftArch, policy: PolicySpace) -> Evaluation:
        """Evaluate a draft with the best of other policies, e.g. chains only."""
        costs = CostModel(self._table, arch, self._dims)
        paths = self._replay(arch)
        return score_tree(
            costs, arch, choose_tree(paths.choose, costs, policy).tree, paths.score, self._dims
        )


def score_tree(
    costs: CostModel, arch: DraftArch, tree: StaticTree, paths: RankPaths, dims: TargetDims
) -> Evaluation:
    """Walk a draft's tree over prompts and price the walk.

    Raises:
        UserError: Nothing to decode, or a size outside the measured range.
    """
    steps = walk(paths, tree)
    prediction = predict_speedup(costs, tree, steps)
    acceptance_length = steps.acceptance_length
    assert acceptance_length is not None, "predict_speedup refuses walks without a round"
    prefill_ms = costs.t_draft_prefill(paths.kept_rows_P).mean() if tree.paths else 0.0
    return Evaluation(
        arch=arch,
        tree=tree,
        acceptance_length=acceptance_length,
        speedup_predicted=prediction.summary,
        round_ms=float(prediction.round_ms_N.mean()),
        draft_prefill_ms=float(prefill_ms),
        plain_ms=float(prediction.plain_ms_P.sum() / steps.num_tokens),
        engines=serving_engines(arch, dims, tree),
    )
