"""Greedy decoding, plain and speculative, in one runtime.

Both arms share prefill, verification, stopping and their one host synchronisation per target pass;
the speculative one adds what the draft costs and skips the passes it saves. Ties of the target's
logits go to the lowest id in both.

Shapes: P prompt tokens, Q verified rows, A rows kept of them, F tapped features.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.decode.accept import accept_greedy, cut_at_stop
from dreams_nas.decode.drafting import DraftSession, ReadyDraft
from dreams_nas.decode.generation import require_greedy
from dreams_nas.decode.plan import TreePlan, build_tree_plan
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import PrefillOutput, Target, TargetCache, TargetInputs


@dataclass(frozen=True)
class Round:
    """One target pass of decoding."""

    drafted: tuple[int, ...]
    """Token of every node, in node order; empty in plain decoding."""
    num_accepted: int
    """Drafted tokens accepted; the bonus token comes on top."""
    seconds: float
    """Wall time from the end of the round before."""


@dataclass
class DecodeRecord:
    """What the target felt while it decoded, kept for replay."""

    prefill: PrefillOutput
    features: list[Tensor] = field(default_factory=list)
    """Tapped features of the committed tokens, [A, F] per round."""


@dataclass(frozen=True)
class DecodeResult:
    """One decoded answer."""

    tokens: list[int]
    """Generated tokens, an end token included when it ended the answer."""
    rounds: list[Round]
    """Target passes after the prefill."""
    prefill_s: float
    """Seconds of the target's prefill."""
    decode_s: float
    """Seconds after it: draft prefill and all rounds."""
    stopped: bool
    """Whether an end token ended the answer, rather than the limit."""
    record: DecodeRecord | None = None
    """Present when it was asked for."""

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding time per token after the first, which the prefill yields; None without any."""
        return self.decode_s / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


def _validate(target: Target, inputs: TargetInputs, max_new_tokens: int) -> int:
    """Refuse what cannot be decoded; return the length of the prompt."""
    require_greedy(target)
    length, limit = len(inputs.input_ids_T), target.spec.max_positions
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
    if length + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {length} tokens and max_new_tokens {max_new_tokens} need "
            f"{length + max_new_tokens} positions; the target has {limit}: shorten the prompt or "
            f"allow at most {max(0, limit - length)} new tokens"
        )
    return length


class _Clock:
    """Wall time that waits for the device, so that a figure holds the work it names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap before."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds


@torch.inference_mode()
def decode(
    target: Target,
    inputs: TargetInputs,
    *,
    max_new_tokens: int,
    draft: ReadyDraft | None = None,
    plan: TreePlan | None = None,
    stop_ids: Sequence[int] | None = None,
    want_record: bool = False,
) -> DecodeResult:
    """Decode one prompt greedily; with a draft, speculatively and with the same result.

    Args:
        target: The model whose answer is wanted.
        inputs: The prompt.
        max_new_tokens: Most tokens to generate, 0 or more.
        draft: Who proposes; None is plain decoding.
        plan: The draft tree; belongs to `draft`.
        stop_ids: End tokens; the target's own when None.
        want_record: Keep the tapped features of all positions.

    Raises:
        UserError: More positions needed than the target has, or a generation config that asks for
            other answers than greedy ones.
    """
    assert (draft is None) == (plan is None), "a draft drafts along a plan"
    length = _validate(target, inputs, max_new_tokens)
    num_nodes = plan.tree.num_nodes if plan is not None else 0
    cache = target.build_cache(length + max_new_tokens + num_nodes + 1)
    taps = draft.target_layer_ids if draft is not None else ()
    stops = frozenset(target.spec.eos_token_ids if stop_ids is None else stop_ids)
    clock = _Clock(target.device)
    prefill = target.prefill(
        inputs,
        cache,
        target_layer_ids=taps,
        want_importance=draft is not None and draft.wants_importance,
    )
    first_1 = prefill.logits_V.argmax(dim=-1, keepdim=True)
    first = int(first_1)
    prefill_s = clock.lap()
    tokens, ended = cut_at_stop([first], 0, max_new_tokens, stops)
    record = DecodeRecord(prefill) if want_record else None
    rounds: list[Round] = []
    if not ended:
        if draft is None or plan is None:
            arm: _Plain | _Speculative = _Plain(target, cache, first_1)
        else:
            session = DraftSession(draft, target, plan, length + max_new_tokens + 1)
            session.prefill(prefill, first_1, inputs)
            arm = _Speculative(target, cache, session, plan, taps, first_1)
        while not ended:
            drafted, gained, features_AF = arm.round()
            kept, ended = cut_at_stop(gained, len(tokens), max_new_tokens, stops)
            tokens += kept
            rounds.append(Round(drafted, len(gained) - 1, clock.lap()))
            if record is not None:
                record.features.append(features_AF)
    return DecodeResult(
        tokens=tokens,
        rounds=rounds,
        prefill_s=prefill_s,
        decode_s=sum(r.seconds for r in rounds),
        stopped=bool(tokens) and tokens[-1] in stops,
        record=record,
    )


class _Plain:
    """One token per target pass."""

    def __init__(self, target: Target, cache: TargetCache, root_1: Tensor) -> None:
        self._target, self._cache, self._root_1 = target, cache, root_1
        self._depth_1 = torch.zeros(1, dtype=torch.int64, device=target.device)

    def round(self) -> tuple[tuple[int, ...], list[int], Tensor]:
        out = self._target.verify(self._root_1, self._depth_1, None, self._cache)
        self._cache.commit([0])
        self._root_1 = out.logits_QV.argmax(dim=-1)
        return (), self._root_1.tolist(), out.features_QF


class _Speculative:
    """Draft, verify, accept, commit; the sync of the draft opens the next round."""

    def __init__(
        self,
        target: Target,
        cache: TargetCache,
        session: DraftSession,
        plan: TreePlan,
        taps: Sequence[int],
        root_1: Tensor,
    ) -> None:
        self._target, self._cache, self._session = target, cache, session
        self._plan, self._taps, self._root_1 = plan, taps, root_1
        self._gained: tuple[Tensor, Tensor] | None = None

    def round(self) -> tuple[tuple[int, ...], list[int], Tensor]:
        if self._gained is not None:
            self._session.sync(*self._gained)
        drafted_N = self._session.propose()
        plan = self._plan
        out = self._target.verify(
            torch.cat([self._root_1, drafted_N]),
            plan.depths_Q,
            plan.mask_QQ,
            self._cache,
            target_layer_ids=self._taps,
        )
        chosen_Q = out.logits_QV.argmax(dim=-1)
        host = torch.cat([drafted_N, chosen_Q]).tolist()  # the round's one synchronisation
        drafted, chosen = host[: len(drafted_N)], host[len(drafted_N) :]
        rows, gained = accept_greedy(plan, drafted, chosen)
        self._cache.commit(rows)
        if rows[-1] == len(rows) - 1:  # ascending from 0: a prefix needs no gathering
            kept_A, features_AF = chosen_Q[: len(rows)], out.features_QF[: len(rows)]
        else:
            index_A = plan.lines[rows[-1]]
            kept_A, features_AF = chosen_Q[index_A], out.features_QF[index_A]
        # What the target chose after each kept row is the token that was gained there.
        self._gained, self._root_1 = (kept_A, features_AF), kept_A[-1:]
        return tuple(drafted), gained, features_AF


def build_plan(tree: StaticTree, target: Target) -> TreePlan | None:
    """The plan of a tree on a target's device and dtype; None for the empty tree."""
    return build_tree_plan(tree, target.device, target.dtype) if tree.num_nodes else None
