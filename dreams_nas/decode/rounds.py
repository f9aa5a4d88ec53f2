"""What one target pass of decoding does: plainly, along a tree, or along a chain drawn at random.

Shapes: N nodes, Q = N + 1 verified rows, A rows kept of them, F tapped features, L levels of a
chain, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dreams_nas.decode.accept import accept_greedy
from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.drafting import DraftSession
from dreams_nas.decode.plan import TreePlan
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


class Speculative:
    """Draft, verify, accept, commit; the sync of the draft opens the next round."""

    def __init__(
        self,
        target: Target,
        cache: TargetCache,
        chooser: Chooser,
        root_1: Tensor,
        session: DraftSession,
        plan: TreePlan,
        taps: Sequence[int],
    ) -> None:
        self._target, self._cache, self._chooser = target, cache, chooser
        self._session, self._plan, self._taps = session, plan, taps
        self._root_1 = root_1
        self._gained: tuple[Tensor, Tensor] | None = None

    def run_one(self) -> Gain:
        """Draft the tree and keep what the target would have said."""
        if self._gained is not None:
            self._session.sync(*self._gained)
        drafted_N = self._session.propose()
        tokens_Q, out = self._verify(drafted_N)
        chosen_Q = self._chooser.choose(out.logits_QV, self._paths(tokens_Q))
        host = torch.cat([drafted_N, chosen_Q]).tolist()  # the round's one synchronisation
        drafted, chosen = host[: len(drafted_N)], host[len(drafted_N) :]
        rows, tokens = accept_greedy(self._plan, drafted, chosen)
        # What the target chose after each kept row is the token that was gained there.
        features_AF = self._commit(rows, chosen_Q, out)
        return Gain(tuple(drafted), tokens, tuple(row - 1 for row in rows[1:]), features_AF)

    def _paths(self, tokens_Q: Tensor) -> Tensor | None:
        """What each row has read behind the history, [Q, L + 1]; None if it does not matter.

        The root is the last token of the history; that it stands in both changes nothing.
        """
        return tokens_Q[self._plan.padded_lines_QL] if self._chooser.wants_history else None

    def _verify(self, drafted_N: Tensor) -> tuple[Tensor, VerifyOutput]:
        plan = self._plan
        tokens_Q = torch.cat([self._root_1, drafted_N])
        out = self._target.verify(
            tokens_Q, plan.depths_Q, plan.mask_QQ, self._cache, target_layer_ids=self._taps
        )
        return tokens_Q, out

    def _commit(self, rows: list[int], gained_Q: Tensor, out: VerifyOutput) -> Tensor:
        """Keep some rows and what was gained at each; return their features."""
        self._cache.commit(rows)
        if rows[-1] == len(rows) - 1:  # ascending from 0: a prefix needs no gathering
            kept_A, features_AF = gained_Q[: len(rows)], out.features_QF[: len(rows)]
        else:
            index_A = self._plan.lines[rows[-1]]
            kept_A, features_AF = gained_Q[index_A], out.features_QF[index_A]
        self._gained, self._root_1 = (kept_A, features_AF), kept_A[-1:]
        self._chooser.note(kept_A)
        return features_AF


class SampledChain(Speculative):
    """A chain that the draft draws at random, accepted against its own distribution."""

    def run_one(self) -> Gain:
        """Draw the chain and keep what the rule lets pass."""
        if self._gained is not None:
            self._session.sync(*self._gained)
        chooser = self._chooser
        drafted_L, draft_LV = self._session.propose_drawn(chooser)
        tokens_Q, out = self._verify(drafted_L)
        target_QV = chooser.probabilities(out.logits_QV, self._paths(tokens_Q))
        is_block = chooser.settings.acceptance == "block"
        judge = block_verdict if is_block else residual_verdict
        verdict = judge(drafted_L, draft_LV.to(target_QV.dtype), target_QV)
        kept = num_kept(verdict, is_block, chooser.generator)
        chosen_Q = chooser.draw(verdict.next_QV)
        host = torch.cat([drafted_L, chosen_Q, kept[None]]).tolist()  # the one synchronisation
        num_levels, num_accepted = len(drafted_L), host[-1]
        drafted = host[:num_levels]
        bonus = host[num_levels + num_accepted]
        gained_A = torch.cat([drafted_L[:num_accepted], chosen_Q[num_accepted : num_accepted + 1]])
        features_AF = self._commit(list(range(num_accepted + 1)), gained_A, out)
        tokens = [*drafted[:num_accepted], bonus]
        return Gain(tuple(drafted), tokens, tuple(range(num_accepted)), features_AF)
