"""The draft's side of a round: committed rows in, drafted tokens out.

Shapes: P prompt tokens, A rows to commit, W rows of a step, N nodes, D hidden, F tapped features,
K best guesses per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.dynamic import Candidates, Director, DynamicPlan, GrownTree
from dreams_nas.decode.parts import Parts
from dreams_nas.decode.plan import LevelPlan, TreePlan, extend_mask
from dreams_nas.draft.cache import DraftCache
from dreams_nas.draft.layers import Rotary, build_rotary, forward_rows, fuse, head
from dreams_nas.draft.model import DraftModel
from dreams_nas.draft.ranks import best_rows
from dreams_nas.draft.visual import kept_rows
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.targets.protocol import PrefillOutput, Target, TargetInputs


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
    """Drafts for one sequence.

    Its methods never look at a value on the host; what `grow` asks its director may.
    """

    def __init__(
        self, draft: ReadyDraft, target: Target, plan: TreePlan | DynamicPlan, capacity: int
    ) -> None:
        """Allocate the cache for `capacity` committed rows besides a round's self-fed ones."""
        self._draft = draft
        self._target = target
        self._plan = plan
        self._cache = DraftCache(draft.weights, capacity + plan.num_self_fed)
        self._table = _reach(draft, capacity + plan.num_levels)
        self._position = 0
        self._state_1D: Tensor | None = None

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

    def propose(self) -> Tensor:
        """Draft the tree below the last committed token, [N] target ids in node order."""
        return self._grow(self._guess)

    def propose_drawn(self, chooser: Chooser) -> tuple[Tensor, Tensor]:
        """Draw a chain from the draft's own warped distributions.

        Returns:
            Target ids [L], and the distribution that each was drawn from over the target's whole
            vocabulary [L, V].
        """
        drawn_from: list[Tensor] = []

        def draw(states_1D: Tensor, level: LevelPlan) -> Tensor:
            probabilities_1W = chooser.warp(head(self._draft.weights, states_1D))
            drawn_from.append(probabilities_1W)
            return self._target_ids(chooser.draw(probabilities_1W))

        tokens_L = self._grow(draw)
        drawn_LW, ids_W = torch.cat(drawn_from), self._draft.vocab_ids_W
        if ids_W is None:
            return tokens_L, drawn_LW
        drawn_LV = drawn_LW.new_zeros(len(drawn_LW), self._target.spec.dims.vocab)
        return tokens_L, drawn_LV.index_copy_(1, ids_W, drawn_LW)

    def grow(self, director: Director, parts: Parts | None = None) -> GrownTree:
        """Grow a tree below the last committed token, as a director decides.

        Args:
            director: Says what is expanded and kept.
            parts: Books passes and ranking as steps, and what is decided as tree.
        """

        def lap(name: str) -> None:
            if parts is not None:
                parts.lap(name)

        assert self._state_1D is not None, "nothing is committed yet"
        assert isinstance(self._plan, DynamicPlan)
        width, cache, states_WD = self._plan.policy.width, self._cache, self._state_1D
        scores_W = torch.zeros(1, dtype=torch.float64, device=states_WD.device)
        seen_WR = torch.zeros(1, 0, dtype=torch.bool, device=states_WD.device)
        candidates = Candidates(states_WD.device)
        for level in range(self._plan.num_levels):
            logits_WV = head(self._draft.weights, states_WD)
            num_guesses = min(width, logits_WV.shape[-1])
            best_WK = best_rows(logits_WV, num_guesses).view(-1, num_guesses)
            likely_WK = logits_WV.float().log_softmax(dim=-1).gather(1, best_WK).double()
            tokens_C = self._target_ids(best_WK.flatten())
            scores_C = (scores_W[:, None] + likely_WK).flatten()
            lap("steps")
            candidates.add(tokens_C, scores_C, num_guesses)
            index_W = director.expand(candidates)
            lap("tree")
            if index_W is None:
                break
            candidates.expand(index_W)
            row_W = index_W // num_guesses
            scores_W, states_WD = scores_C[index_W], states_WD[row_W]
            own_WW = torch.eye(len(index_W), dtype=torch.bool, device=row_W.device)
            seen_WR = torch.cat([seen_WR[row_W], own_WW], dim=1)
            cache.open(len(index_W))
            position = self._position + level
            states_WD = forward_rows(
                self._draft.weights,
                self._target.embed(tokens_C[index_W])[None],
                states_WD[None],
                self._rotary(position, position + 1),
                cache,
                torch.nn.functional.pad(seen_WR, (cache.length, 0), value=True),
            )[0]
        cache.rewind()
        return candidates.take(director.keep(candidates))

    def _grow(self, guess: Callable[[Tensor, LevelPlan], Tensor]) -> Tensor:
        """Run the draft level by level; `guess` gives the tokens of a level's nodes."""
        assert self._state_1D is not None, "nothing is committed yet"
        assert isinstance(self._plan, TreePlan)
        cache, states_WD = self._cache, self._state_1D
        tokens: list[Tensor] = []
        for depth, level in enumerate(self._plan.levels):
            tokens.append(guess(states_WD, level))
            if not level.num_expanded:
                break
            fed_W = tokens[-1] if level.expanded is None else tokens[-1][level.expanded]
            if level.state_rows is not None:
                states_WD = states_WD[level.state_rows]
            cache.open(level.num_expanded)
            position = self._position + depth
            states_WD = forward_rows(
                self._draft.weights,
                self._target.embed(fed_W)[None],
                states_WD[None],
                self._rotary(position, position + 1),
                cache,
                extend_mask(level.step_mask, cache.length),
            )[0]
        cache.rewind()
        return torch.cat(tokens) if len(tokens) > 1 else tokens[0]

    def _rotary(self, start: int, stop: int) -> Rotary:
        return Rotary(self._table.cos[start:stop], self._table.sin[start:stop])

    def _commit(self, embeddings_AD: Tensor, features_AF: Tensor, rotary: Rotary) -> None:
        """Run committed rows; the state of the last one is where the next round starts."""
        weights, num_rows = self._draft.weights, len(embeddings_AD)
        mask = None
        if num_rows > 1 and len(weights.layers) > 1:
            mask_AA = torch.ones(num_rows, num_rows, dtype=torch.bool, device=rotary.cos.device)
            visible = torch.nn.functional.pad(mask_AA.tril_(), (self._cache.length, 0), value=True)
            mask = torch.zeros(visible.shape, dtype=features_AF.dtype, device=visible.device)
            mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
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

    def _guess(self, states_WD: Tensor, level: LevelPlan) -> Tensor:
        """Best guesses of some rows, flattened row by row, then the nodes' own picked out."""
        ids = best_rows(head(self._draft.weights, states_WD), level.num_ranks)
        return self._target_ids(ids if level.picks is None else ids[level.picks])

    def _target_ids(self, ids: Tensor) -> Tensor:
        """Head rows to target ids."""
        return ids if self._draft.vocab_ids_W is None else self._draft.vocab_ids_W[ids]
