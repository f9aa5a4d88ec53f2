"""Whole draft passes through `DraftSession`, again and again from the same state.

Shapes: P prompt rows, A rows to commit, D hidden, F tapped features.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from dreams_nas.decode.drafting import DraftSession, ReadyDraft
from dreams_nas.decode.engine import build_plan
from dreams_nas.decode.plan import TreePlan
from dreams_nas.profiling.random_drafts import RandomDrafts
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import PrefillOutput, Target, TargetInputs


class DraftPass(NamedTuple):
    """A timed act of a draft, and what has to precede it untimed."""

    run: Callable[[], object]
    restart: Callable[[], object]
    """Brings it back to where it runs from."""
    prepare: Callable[[], object]
    """Some of its kind, untimed, then `restart`."""


_NUM_BEFORE = 2
"""Passes of its kind before a timed one; see `target_blocks`."""


class _Restart:
    """Brings a session back to where kv rows were committed, as often as wanted."""

    def __init__(self, session: DraftSession, kv: int) -> None:
        self._opened, self._kv = session, kv
        self.session = session

    def __call__(self) -> None:
        self._opened.cache.length = self._kv
        self._opened.cache.rewind()
        self.session = copy.copy(self._opened)  # its position and state; the cache is shared


def _settled(
    disturb: Callable[[], object] | None, restart: _Restart, run: Callable[[], object]
) -> Callable[[], None]:
    """Runs a pass and what lies between two of its kind, so that it is timed as one of several."""

    def prepare() -> None:
        for _ in range(_NUM_BEFORE):
            restart()
            run()
            if disturb is not None:
                disturb()
        restart()

    return prepare


class DraftPasses:
    """Builds passes of any draft over the same number of committed rows."""

    def __init__(self, target: Target, drafts: RandomDrafts, kv: int, max_new: int) -> None:
        """Draw what the target would hand to the drafts.

        Args:
            target: The target.
            drafts: Source of random values.
            kv: Rows committed before a pass.
            max_new: Most rows that one sync commits.
        """
        self._target, self._drafts = target, drafts
        self.kv, self._max_new = kv, max_new
        self._tokens = drafts.tokens(max_new)
        self._values: dict[int, Tensor] = {}

    def prefill(self, draft: ReadyDraft, num_rows: int) -> Callable[[], DraftSession]:
        """Opens a new session and commits a prompt of so many rows."""
        return self._opening(draft, self._plan(StaticTree.chain(1)), num_rows)

    def sync(
        self,
        session: DraftSession,
        num_taps: int,
        num_new: int,
        kv: int,
        disturb: Callable[[], object],
    ) -> DraftPass:
        """The draft commits `num_new` rows over kv rows, without drafting.

        Args:
            session: Of `prefill` with at least kv rows; passes of other sizes may share it.
            num_taps: Tapped layers of its draft.
            num_new: Rows to commit, at least 1.
            kv: Rows that it finds.
            disturb: What runs before it, as the target does in a round.
        """
        features_AF, tokens_A = self._rows(num_new, num_taps), self._tokens[:num_new]
        restart = _Restart(session, kv)

        def run() -> None:
            restart.session.sync(tokens_A, features_AF)

        return DraftPass(run, restart, _settled(disturb, restart, run))

    def sync_and_propose(
        self,
        draft: ReadyDraft,
        tree: StaticTree,
        num_new: int,
        disturb: Callable[[], object] | None,
    ) -> DraftPass:
        """The draft's whole part of a round: sync of `num_new` rows, then all levels of the tree.

        Args:
            draft: The draft.
            tree: What it drafts.
            num_new: Rows to commit; 0 leaves the sync out.
            disturb: What runs before it, as the target does in a round; None for the pass itself,
                as self-fed steps follow each other.
        """
        plan = self._plan(tree)
        restart = _Restart(self._opening(draft, plan, self.kv)(), self.kv)
        features_AF, tokens_A = self._features(draft, num_new), self._tokens[:num_new]

        def run() -> None:
            if num_new:
                restart.session.sync(tokens_A, features_AF)
            restart.session.propose(plan)

        return DraftPass(run, restart, _settled(disturb, restart, run))

    def _features(self, draft: ReadyDraft, num_rows: int) -> Tensor:
        return self._rows(num_rows, len(draft.target_layer_ids))

    def _rows(self, num_rows: int, num_taps: int) -> Tensor:
        """Random rows of so many taps; all passes share them, or a large target's would not fit."""
        values = self._values.get(num_taps)
        if values is None or len(values) < num_rows:
            values = self._drafts.normal(num_rows, num_taps * self._target.spec.dims.hidden)
            self._values[num_taps] = values
        return values[:num_rows]

    def _plan(self, tree: StaticTree) -> TreePlan:
        plan = build_plan(tree, self._target)
        assert plan is not None, "a draft that drafts nothing has no passes"
        return plan

    def _opening(
        self, draft: ReadyDraft, plan: TreePlan, num_rows: int
    ) -> Callable[[], DraftSession]:
        inputs = TargetInputs(self._drafts.tokens(num_rows))
        first_1 = inputs.input_ids_T[:1]
        prompt = PrefillOutput(
            logits_V=self._target.head_weight_VD[:, 0],
            features_TF=self._features(draft, num_rows),
            embeddings_TD=self._rows(num_rows, 1),
            importance_T=None,
        )

        def run() -> DraftSession:
            session = DraftSession(draft, self._target, plan, num_rows + self._max_new)
            session.prefill(prompt, first_1, inputs)
            return session

        return run
