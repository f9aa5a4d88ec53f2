"""What one target pass of decoding does: plainly, along a tree, along a chain drawn at random.

Shapes: N nodes, Q = N + 1 verified rows, A rows kept of them, F tapped features, L levels of a
chain, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dreams_nas.decode.accept import accept_greedy, children_of
from dreams_nas.decode.adaptive import (
    AdaptivePlan,
    Economist,
    VerifyTensors,
    grow_while_it_pays,
    to_device,
)
from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.dynamic import DynamicPlan, ancestry, grow
from dreams_nas.decode.parts import Parts
from dreams_nas.decode.plan import TreePlan, additive_mask
from dreams_nas.decode.residual import block_verdict, num_kept, residual_verdict
from dreams_nas.targets.protocol import Target, TargetCache, VerifyOutput


class Gain(NamedTuple):
    """What a round committed."""

    drafted: tuple[int, ...]
    """Token of every node, in node order; empty in plain decoding."""
    tokens: list[int]
    """Tokens gained: the accepted ones and the bonus token."""
    path: tuple[int, ...]
    """Accepted nodes, from the root down."""
    features_AF: Tensor
    """Tapped features of the kept rows."""
    parents: tuple[int, ...] | None = None
    """Parent node of each node, -1 the root, where the tree was grown for this round."""
    scores: tuple[float, ...] | None = None
    """Log-probability of each node's path there, where it was asked for."""


class Rounds(Protocol):
    """One way to decode; holds the state of one request."""

    def run_one(self) -> Gain:
        """Run one target pass and commit what it gained."""


class Plain:
    """One token per target pass."""

    def __init__(
        self, target: Target, cache: TargetCache, chooser: Chooser, root_1: Tensor
    ) -> None:
        self._target, self._cache, self._chooser = target, cache, chooser
        self._root_1 = root_1
        self._depth_1 = torch.zeros(1, dtype=torch.int64, device=target.device)

    def run_one(self) -> Gain:
        """Verify the last token alone."""
        out = self._target.verify(self._root_1, self._depth_1, None, self._cache)
        self._cache.commit([0])
        self._root_1 = self._chooser.choose(out.logits_QV)
        self._chooser.note(self._root_1)
        return Gain((), self._root_1.tolist(), (), out.features_QF)


class _Drafted:
    """What all ways with a draft share: a sync opens a round, kept rows end it."""

    def __init__(
        self,
        target: Target,
        cache: TargetCache,
        chooser: Chooser,
        root_1: Tensor,
        session: DraftSession,
        taps: Sequence[int],
        parts: Parts | None = None,
    ) -> None:
        self._target, self._cache, self._chooser = target, cache, chooser
        self._session, self._taps = session, taps
        self._root_1 = root_1
        self._parts = parts
        self._gained: tuple[Tensor, Tensor] | None = None

    def _open(self) -> None:
        """Begin a round: the draft commits what the last one gained."""
        if self._parts is not None:
            self._parts.start()
        if self._gained is not None:
            self._session.sync(*self._gained)
            self._lap("sync")

    def _lap(self, name: str) -> None:
        if self._parts is not None:
            self._parts.lap(name)

    def _verify(self, tokens_Q: Tensor, depths_Q: Tensor, mask_QQ: Tensor | None) -> VerifyOutput:
        self._lap("tree")
        out = self._target.verify(
            tokens_Q, depths_Q, mask_QQ, self._cache, target_layer_ids=self._taps
        )
        self._lap("verify")
        return out

    def _commit(self, rows: list[int], gained_A: Tensor, features_AF: Tensor) -> None:
        """Keep verified rows, the tokens gained at them and their features."""
        self._cache.commit(rows)
        self._gained, self._root_1 = (gained_A, features_AF), gained_A[-1:]
        self._chooser.note(gained_A)
        self._lap("commit")


class Speculative(_Drafted):
    """Along a static tree: what the target would have said itself is kept."""

    def __init__(self, plan: TreePlan, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._plan = plan

    def run_one(self) -> Gain:
        """Draft the tree and keep what the target would have said."""
        self._open()
        drafted_N = self._session.propose(self._plan)
        self._lap("steps")
        plan = self._plan
        tokens_Q = torch.cat([self._root_1, drafted_N])
        out = self._verify(tokens_Q, plan.depths_Q, plan.mask_QQ)
        chosen_Q = self._chooser.choose(out.logits_QV, self._paths(tokens_Q))
        host = torch.cat([drafted_N, chosen_Q]).tolist()  # the round's one synchronisation
        drafted, chosen = host[: len(drafted_N)], host[len(drafted_N) :]
        rows, tokens = accept_greedy(plan.children, drafted, chosen)
        self._lap("accept")
        # What the target chose after each kept row is the token that was gained there.
        if rows[-1] == len(rows) - 1:  # ascending from 0: a prefix needs no gathering
            kept_A, features_AF = chosen_Q[: len(rows)], out.features_QF[: len(rows)]
        else:
            index_A = plan.lines[rows[-1]]
            kept_A, features_AF = chosen_Q[index_A], out.features_QF[index_A]
        self._commit(rows, kept_A, features_AF)
        return Gain(tuple(drafted), tokens, tuple(row - 1 for row in rows[1:]), features_AF)

    def _paths(self, tokens_Q: Tensor) -> Tensor | None:
        """What each row has read behind the history, [Q, L + 1]; None if it does not matter.

        The root is the last token of the history; that it stands in both changes nothing.
        """
        return tokens_Q[self._plan.padded_lines_QL] if self._chooser.wants_history else None


class SampledChain(Speculative):
    """A chain that the draft draws at random, accepted against its own distribution."""

    def run_one(self) -> Gain:
        """Draw the chain and keep what the rule lets pass."""
        self._open()
        chooser, plan = self._chooser, self._plan
        drafted_L, draft_LV = self._session.propose_drawn(plan, chooser)
        self._lap("steps")
        tokens_Q = torch.cat([self._root_1, drafted_L])
        out = self._verify(tokens_Q, plan.depths_Q, plan.mask_QQ)
        target_QV = chooser.probabilities(out.logits_QV, self._paths(tokens_Q))
        is_block = chooser.settings.acceptance == "block"
        judge = block_verdict if is_block else residual_verdict
        verdict = judge(drafted_L, draft_LV.to(target_QV.dtype), target_QV)
        kept = num_kept(verdict, is_block, chooser.generator)
        chosen_Q = chooser.draw(verdict.next_QV)
        host = torch.cat([drafted_L, chosen_Q, kept[None]]).tolist()  # the one synchronisation
        num_levels, num_accepted = len(drafted_L), host[-1]
        drafted = host[:num_levels]
        tokens = [*drafted[:num_accepted], host[num_levels + num_accepted]]
        self._lap("accept")
        num_rows = num_accepted + 1
        gained_A = torch.cat([drafted_L[:num_accepted], chosen_Q[num_accepted:num_rows]])
        features_AF = out.features_QF[:num_rows]
        self._commit(list(range(num_rows)), gained_A, features_AF)
        return Gain(tuple(drafted), tokens, tuple(range(num_accepted)), features_AF)


class _Branching(_Drafted):
    """Along a tree that is new in every round."""

    def _choose(self, logits_QV: Tensor, mask_QQ: Tensor | None, tokens_Q: Tensor) -> Tensor:
        """The target's token after each row."""
        if mask_QQ is None or not self._chooser.wants_history:
            return self._chooser.choose(logits_QV)
        # A row's own token stands in for what it has not read.
        paths_QQ = torch.where(mask_QQ == 0, tokens_Q, tokens_Q[:, None])
        return self._chooser.choose(logits_QV, paths_QQ)

    def _keep(self, rows: list[int], chosen_Q: Tensor, features_QF: Tensor) -> Tensor:
        """Commit verified rows; returns their features."""
        if rows[-1] == len(rows) - 1:
            kept_A, features_AF = chosen_Q[: len(rows)], features_QF[: len(rows)]
        else:
            index_A = to_device(rows, chosen_Q.device)
            kept_A, features_AF = chosen_Q[index_A], features_QF[index_A]
        self._commit(rows, kept_A, features_AF)
        return features_AF


class Grown(_Branching):
    """Along the likeliest paths of every round."""

    def __init__(self, plan: DynamicPlan, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._plan = plan

    def run_one(self) -> Gain:
        """Grow a tree and keep what the target would have said."""
        self._open()
        grown = grow(self._session, self._plan.policy, self._parts)
        tokens_Q = torch.cat([self._root_1, grown.tokens_N])
        mask_QQ = self._mask(ancestry(grown.parents_N, self._plan.num_levels))
        out = self._verify(tokens_Q, grown.depths_Q, mask_QQ)
        chosen_Q = self._choose(out.logits_QV, mask_QQ, tokens_Q)
        num_nodes = len(grown.tokens_N)
        host = torch.cat([grown.tokens_N, grown.parents_N, chosen_Q]).tolist()
        drafted, parents = host[:num_nodes], host[num_nodes : 2 * num_nodes]
        rows, tokens = accept_greedy(children_of(parents), drafted, host[2 * num_nodes :])
        if self._plan.commits_one:
            rows, tokens = rows[:1], tokens[:1]
        self._lap("accept")
        return Gain(
            drafted=tuple(drafted),
            tokens=tokens,
            path=tuple(row - 1 for row in rows[1:]),
            features_AF=self._keep(rows, chosen_Q, out.features_QF),
            parents=tuple(parent - 1 for parent in parents),
            scores=tuple(grown.scores_N.tolist()) if self._plan.wants_scores else None,
        )

    def _mask(self, seen_QQ: Tensor) -> Tensor | None:
        """Additive mask of the verified rows; None for a lone root."""
        if len(seen_QQ) == 1:
            return None
        return additive_mask(seen_QQ, self._target.dtype)


class Adaptive(_Branching):
    """Along a tree that costs and probabilities decide about."""

    def __init__(self, plan: AdaptivePlan, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._economist = Economist(plan)
        target = self._target
        self._tensors = VerifyTensors(plan.num_nodes + 1, target.dtype, target.device)

    def run_one(self) -> Gain:
        """Grow a tree and keep what the target would have said."""
        self._open()
        tree = grow_while_it_pays(self._session, self._economist, self._parts)
        device = self._target.device
        depths_Q, mask_QQ = self._tensors.of(tree)
        tokens_Q = self._root_1
        if tree.tokens:
            tokens_Q = torch.cat([tokens_Q, to_device(tree.tokens, device)])
        out = self._verify(tokens_Q, depths_Q, mask_QQ)
        chosen_Q = self._choose(out.logits_QV, mask_QQ, tokens_Q)
        rows, tokens = accept_greedy(children_of(tree.parents), tree.tokens, chosen_Q.tolist())
        self._lap("accept")
        self._economist.observe(len(tokens))
        return Gain(
            drafted=tuple(tree.tokens),
            tokens=tokens,
            path=tuple(row - 1 for row in rows[1:]),
            features_AF=self._keep(rows, chosen_Q, out.features_QF),
            parents=tuple(parent - 1 for parent in tree.parents),
            scores=tuple(tree.scores),
        )
