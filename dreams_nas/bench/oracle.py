"""A draft that knows the answer: every verification it asks for is as deep as the tree allows.

With it an audit of verification needs no trained draft: every round accepts as deep as its tree
goes, so that the rows of the accepted path, the moves of kept rows and what later rounds read of
them are compared with plain decoding, inside the engine's own rounds. It taps nothing.

Shapes: A rows to commit, F tapped features, N nodes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dreams_nas.decode.drafting import Bounds, DraftSession
from dreams_nas.decode.plan import TreePlan
from dreams_nas.targets.protocol import PrefillOutput, Target, TargetInputs


class OracleDraft:
    """Proposes an answer that is known, and wrong tokens beside it."""

    target_layer_ids: tuple[int, ...] = ()
    wants_importance = False

    def __init__(self, answer: Sequence[int], vocab: int) -> None:
        """Take the answer, the token from the prefill included."""
        self._answer, self._vocab = list(answer), vocab

    def open_session(self, target: Target, bounds: Bounds, capacity: int) -> DraftSession:
        """A session at the answer's second token."""
        return _OracleSession(self._answer, self._vocab, target.device)


class _OracleSession(DraftSession):
    def __init__(self, answer: list[int], vocab: int, device: torch.device) -> None:
        self._answer, self._vocab, self._device = answer, vocab, device
        self._next = 1

    def prefill(self, prefill: PrefillOutput, first_token_1: Tensor, inputs: TargetInputs) -> None:
        """Nothing to read."""

    def sync(self, tokens_A: Tensor, features_AF: Tensor) -> None:
        """Go on by the tokens gained."""
        self._next += len(tokens_A)

    def propose(self, plan: TreePlan) -> Tensor:
        """The answer along every best guess, other tokens elsewhere."""
        tokens = []
        for path in plan.tree.paths:
            place = self._next + len(path) - 1
            known = self._answer[place] if place < len(self._answer) else 0
            tokens.append((known + path[-1]) % self._vocab)
        return torch.tensor(tokens, device=self._device)
