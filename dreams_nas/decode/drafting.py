"""The draft's side of a round: committed rows in, drafted tokens out.

Shapes: P prompt tokens, A rows to commit, W rows of a step, R self-fed rows of a round, N nodes,
D hidden, F tapped features, K best guesses per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.plan import LevelPlan, TreePlan, additive_mask, extend_mask
from dreams_nas.draft.cache import DraftCache
from dreams_nas.draft.layers import Rotary, build_rotary, forward_rows, fuse, head
from dreams_nas.draft.model import DraftModel
from dreams_nas.draft.ranks import best_rows
from dreams_nas.draft.visual import kept_rows
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.targets.protocol import PrefillOutput, Target, TargetInputs


class Bounds(Protocol):
    """What a draft's caches must hold."""

    @property
    def num_levels(self) -> int:
        """Longest path."""

    @property
    def num_self_fed(self) -> int:
        """Most self-fed rows of a round."""


class Drafter(Protocol):
    """Whoever proposes tokens; holds no state of a sequence."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers of the target that it reads."""

    @property
    def wants_importance(self) -> bool:
        """Whether the prefill must rank image tokens."""

    def open_session(self, target: Target, bounds: Bounds, capacity: int) -> "DraftSession":
        """Begin a sequence of at most `capacity` committed rows."""


@dataclass(frozen=True)
class ReadyDraft:
    """A draft bound to its target, ready to decode."""

    weights: DraftWeights
    vocab_ids_W: Tensor | None
    """Target id of each proposable token; None when all are, in the target's order."""
    target_layer_ids: tuple[int, ...]
    keep_ratio: float
    rotary: Rotary
    """Of the target's positions, [S, E]; `DraftSession` adds what a deep tree reaches beyond."""

    @property
    def wants_importance(self) -> bool:
        """Whether image tokens must be ranked: not when all or none are kept."""
        return 0 < self.keep_ratio < 1

    def open_session(self, target: Target, bounds: Bounds, capacity: int) -> "DraftSession":
        """See `Drafter.open_session`."""
        return DraftSession(self, target, bounds, capacity)


def ready_draft(draft: DraftModel, target: Target) -> ReadyDraft:
    """Bind a draft to its target.

    Raises:
        UserError: The draft belongs to another target.
    """
    config, spec = draft.config, target.spec
    config.require_target(spec.tokenizer_hash, spec.embedding_hash, spec.name)
    with torch.inference_mode():
        weights = draft.weights(target.head_weight_VD)
        positions = torch.arange(spec.max_positions, device=target.device)
        ids_W = draft.vocab_ids_W
        in_order = torch.equal(ids_W, torch.arange(spec.dims.vocab, device=ids_W.device))
        return ReadyDraft(
            weights=weights,
            vocab_ids_W=None if in_order else ids_W,
            target_layer_ids=config.sizes.target_layer_ids,
            keep_ratio=config.arch.keep_ratio,
            rotary=build_rotary(weights.inv_freq, positions, target.dtype),
        )


def _reach(draft: ReadyDraft, num_positions: int) -> Rotary:
    """Rotary table of at least that many positions.

    Near the target's last position a tree still drafts to its full depth: what lies behind the
    limit is thrown away afterwards, but needs a position until then.
    """
    table = draft.rotary
    known = len(table.cos)
    if num_positions <= known:
        return table
    positions = torch.arange(known, num_positions, device=table.cos.device)
    more = build_rotary(draft.weights.inv_freq, positions, table.cos.dtype)
    return Rotary(torch.cat([table.cos, more.cos]), torch.cat([table.sin, more.sin]))


class DraftSession:
    """Drafts for one sequence. Its methods never look at a value on the host.

    A round is `open_round`, then guesses of the open rows and `feed` by turns, then `close_round`;
    `propose` does all of it along a static tree.
    """

    def __init__(self, draft: ReadyDraft, target: Target, bounds: Bounds, capacity: int) -> None:
        """Allocate the cache for `capacity` committed rows besides a round's self-fed ones."""
        self._draft = draft
        self._target = target
        self._cache = DraftCache(draft.weights, capacity + bounds.num_self_fed)
        self._table = _reach(draft, capacity + bounds.num_levels)
        self._position = 0
        self._state_1D: Tensor | None = None
        self._open_WD = torch.empty(0)
        self._depth = 0

    @property
    def cache(self) -> DraftCache:
        """Keys and values; committed rows only between rounds."""
        return self._cache

    def prefill(self, prefill: PrefillOutput, first_token_1: Tensor, inputs: TargetInputs) -> None:
        """Commit the rows of the prompt, dropped image tokens left out.

        Args:
            prefill: The target's prefill.
            first_token_1: The token it chose, int64.
            inputs: The prompt.
        """
        length = len(inputs.input_ids_T)
        rows_R = kept_rows(
            length,
            inputs.image_spans,
            self._draft.keep_ratio,
            prefill.importance_T,
            self._target.device,
        )
        embeddings_PD = torch.cat(
            [prefill.embeddings_TD[1:], self._target.embed(first_token_1)], dim=0
        )
        rotary = Rotary(self._table.cos[rows_R], self._table.sin[rows_R])
        self._commit(embeddings_PD[rows_R], prefill.features_TF[rows_R], rotary)
        self._position = length

    def sync(self, tokens_A: Tensor, features_AF: Tensor) -> None:
        """Commit the rows of the tokens gained last round, from their target features."""
        stop = self._position + len(tokens_A)
        self._commit(self._target.embed(tokens_A), features_AF, self._rotary(self._position, stop))
        self._position = stop

    def open_round(self) -> None:
        """Begin below the last committed token: its row is the open one."""
        assert self._state_1D is not None, "nothing is committed yet"
        self._open_WD, self._depth = self._state_1D, 0

    def guess_likely(self, num_guesses: int) -> tuple[Tensor, Tensor]:
        """The best guesses of the open rows and how likely the draft holds them.

        Returns:
            Target ids [W, K], and natural logarithms of their probabilities, float32 [W, K].
        """
        logits_WV = head(self._draft.weights, self._open_WD).float()
        likely_WK, best_WK = logits_WV.log_softmax(dim=-1).topk(
            min(num_guesses, logits_WV.shape[-1]), dim=-1
        )
        return self._target_ids(best_WK), likely_WK

    def feed(self, tokens_W: Tensor, rows_W: Tensor | None, mask_WR: Tensor | None) -> None:
        """Feed guesses back; their rows are the open ones then.

        Args:
            tokens_W: Target ids.
            rows_W: The open row that each belongs to; None when that is all, in order.
            mask_WR: What each sees of the round's self-fed rows, its own included, additive or
                boolean; None when each sees all of them.
        """
        states_WD = self._open_WD if rows_W is None else self._open_WD[rows_W]
        self._cache.open(len(tokens_W))
        self._open_WD = self._step(tokens_W, states_WD, mask_WR)
        self._depth += 1

    def _step(self, tokens_W: Tensor, states_WD: Tensor, mask_WR: Tensor | None) -> Tensor:
        position = self._position + self._depth
        return forward_rows(
            self._draft.weights,
            self._target.embed(tokens_W)[None],
            states_WD[None],
            self._rotary(position, position + 1),
            self._cache,
            extend_mask(mask_WR, self._cache.length),
        )[0]

    def close_round(self) -> None:
        """Forget the self-fed rows."""
        self._cache.rewind()

    def propose(self, plan: TreePlan) -> Tensor:
        """Draft the tree below the last committed token, [N] target ids in node order."""
        return self._draft_along(plan, self._guess)

    def propose_drawn(self, plan: TreePlan, chooser: Chooser) -> tuple[Tensor, Tensor]:
        """Draw a chain from the draft's own warped distributions.

        Returns:
            Target ids [L], and the distribution that each was drawn from over the target's whole
            vocabulary [L, V].
        """
        drawn_from: list[Tensor] = []

        def draw(level: LevelPlan) -> Tensor:
            probabilities_1W = chooser.warp(head(self._draft.weights, self._open_WD))
            drawn_from.append(probabilities_1W)
            return self._target_ids(chooser.draw(probabilities_1W))

        tokens_L = self._draft_along(plan, draw)
        drawn_LW, ids_W = torch.cat(drawn_from), self._draft.vocab_ids_W
        if ids_W is None:
            return tokens_L, drawn_LW
        drawn_LV = drawn_LW.new_zeros(len(drawn_LW), self._target.spec.dims.vocab)
        return tokens_L, drawn_LV.index_copy_(1, ids_W, drawn_LW)

    def _draft_along(self, plan: TreePlan, guess: Callable[[LevelPlan], Tensor]) -> Tensor:
        """Run the draft level by level; `guess` gives the tokens of a level's nodes."""
        self.open_round()
        tokens: list[Tensor] = []
        for level in plan.levels:
            tokens.append(guess(level))
            if not level.num_expanded:
                break
            fed_W = tokens[-1] if level.expanded is None else tokens[-1][level.expanded]
            self.feed(fed_W, level.state_rows, level.step_mask)
        self.close_round()
        return torch.cat(tokens) if len(tokens) > 1 else tokens[0]

    def _guess(self, level: LevelPlan) -> Tensor:
        """Best guesses of the open rows, flattened row by row, then the nodes' own picked out."""
        ids = best_rows(head(self._draft.weights, self._open_WD), level.num_ranks)
        return self._target_ids(ids if level.picks is None else ids[level.picks])

    def _rotary(self, start: int, stop: int) -> Rotary:
        return Rotary(self._table.cos[start:stop], self._table.sin[start:stop])

    def _commit(self, embeddings_AD: Tensor, features_AF: Tensor, rotary: Rotary) -> None:
        """Run committed rows; the state of the last one is where the next round starts."""
        weights, num_rows = self._draft.weights, len(embeddings_AD)
        mask = None
        if num_rows > 1 and len(weights.layers) > 1:
            mask_AA = torch.ones(num_rows, num_rows, dtype=torch.bool, device=rotary.cos.device)
            visible = torch.nn.functional.pad(mask_AA.tril_(), (self._cache.length, 0), value=True)
            mask = additive_mask(visible, features_AF.dtype)
        self._cache.open(num_rows)
        self._state_1D = forward_rows(
            weights,
            embeddings_AD[None],
            fuse(weights, features_AF)[None],
            rotary,
            self._cache,
            mask,
            num_queries=1,
        )[0]
        self._cache.commit()

    def _target_ids(self, ids: Tensor) -> Tensor:
        """Head rows to target ids."""
        return ids if self._draft.vocab_ids_W is None else self._draft.vocab_ids_W.take(ids)
