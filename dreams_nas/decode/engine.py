"""Decoding, plain and speculative, in one runtime.

Both arms share prefill, verification, stopping and their one host synchronisation per target pass;
the speculative one adds what the draft costs and skips the passes it saves. Ties of the target's
logits go to the lowest id in both.

Shapes: A rows kept of a round, F tapped features.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.decode.adaptive import AdaptivePlan
from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.drafting import Drafter
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.decode.generation import effective_settings
from dreams_nas.decode.parts import Parts
from dreams_nas.decode.plan import TreePlan, build_tree_plan
from dreams_nas.decode.policies import Policy
from dreams_nas.decode.rounds import Adaptive, Grown, Plain, Rounds, SampledChain, Speculative
from dreams_nas.decode.settings import GREEDY, GenerationSettings
from dreams_nas.decode.stopping import StopStrings, cut_at_stop
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import PrefillOutput, Target, TargetInputs

Plan = TreePlan | DynamicPlan | AdaptivePlan
"""How a draft's trees look: one for all rounds, or grown in each."""


@dataclass(frozen=True)
class Round:
    """One target pass of decoding."""

    drafted: tuple[int, ...]
    """Token of every node, in node order; empty in plain decoding."""
    path: tuple[int, ...]
    """Accepted nodes, from the root down; the bonus token comes on top."""
    seconds: float
    """Wall time from the end of the round before."""
    parents: tuple[int, ...] | None = None
    """Parent node of each node, -1 the root, where the tree was grown for this round."""
    scores: tuple[float, ...] | None = None
    """Log-probability of each node's path there, by the draft, where it was asked for."""

    @property
    def num_accepted(self) -> int:
        """Drafted tokens accepted."""
        return len(self.path)


@dataclass(frozen=True)
class Step:
    """What a target pass added to an answer."""

    tokens: list[int]
    """Tokens that count: none beyond the end of the answer."""
    ended: bool
    """Whether the answer ends with them."""
    stopped: bool
    """Whether an end token or a stop string ended it, rather than the limit."""
    seconds: float
    """Wall time of the pass: the target's prefill, then each round."""
    round: Round | None
    """What a round did; None for the prefill."""
    prefill: PrefillOutput | None
    """What the prefill yielded; None for a round."""
    features_AF: Tensor | None
    """Tapped features of the rows a round committed; None for the prefill."""


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
    """Whether an end token or a stop string ended the answer, rather than the limit."""
    record: DecodeRecord | None = None
    """Present when it was asked for."""

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding time per token after the first, which the prefill yields; None without any."""
        return self.decode_s / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


def require_decodable(
    target: Target,
    inputs: TargetInputs,
    max_new_tokens: int,
    settings: GenerationSettings,
    plan: Plan | None,
) -> int:
    """Refuse what cannot be decoded; return the length of the prompt.

    Raises:
        UserError: More positions needed than the target has, or settings that a tree cannot honour.
    """
    length, limit = len(inputs.input_ids_T), target.spec.max_positions
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise UserError(
            f"max_new_tokens is {max_new_tokens!r}; it must be a whole number, 0 or more"
        )
    if length + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {length} tokens and max_new_tokens {max_new_tokens} need "
            f"{length + max_new_tokens} positions; the target has {limit}: shorten the prompt or "
            f"allow at most {max(0, limit - length)} new tokens"
        )
    if plan is not None:
        require_chain(settings, plan.tree if isinstance(plan, TreePlan) else plan)
    return length


def require_chain(settings: GenerationSettings, policy: Policy) -> None:
    """Refuse drawn drafts along anything but a chain.

    Raises:
        UserError: Names the rule of acceptance and the policy.
    """
    if settings.draws_drafts and not (isinstance(policy, StaticTree) and policy.is_chain):
        raise UserError(
            f"acceptance '{settings.acceptance}' needs a chain, and the policy is a tree of "
            f"{policy.num_nodes} nodes on {policy.num_levels} levels: draft a chain (--chain "
            "LEVELS) or accept by 'match', which any tree can"
        )


class _Clock:
    """Wall time of steps.

    A step ends when its tokens are on the host, so it needs no further waiting for the device: what
    is queued behind them, keeping the accepted rows, belongs to the next step.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap before."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def restart(self) -> None:
        """Leave out what the consumer of a step did with it."""
        self._last = time.perf_counter()


@torch.inference_mode()
def decode_steps(
    target: Target,
    inputs: TargetInputs,
    *,
    max_new_tokens: int,
    draft: Drafter | None = None,
    plan: Plan | None = None,
    stop_ids: Sequence[int] | None = None,
    settings: GenerationSettings = GREEDY,
    generator: torch.Generator | None = None,
    parts: Parts | None = None,
) -> Iterator[Step]:
    """Decode one prompt, step by step: the prefill, then a step per round.

    Args:
        target: The model whose answer is wanted.
        inputs: The prompt.
        max_new_tokens: Most tokens to generate, 0 or more.
        draft: Who proposes; None is plain decoding.
        plan: The draft tree; belongs to `draft`.
        stop_ids: End tokens; the target's own when None.
        settings: How tokens are chosen, and stop strings.
        generator: Random numbers of this request; torch's global ones when None.
        parts: Watches what rounds with a draft spend their time on.

    Raises:
        UserError: More positions needed than the target has, settings that a tree cannot honour,
            or a generation config that asks for what decoding here does not do.
    """
    assert (draft is None) == (plan is None), "a draft drafts along a plan"
    settings = effective_settings(target, settings)
    length = require_decodable(target, inputs, max_new_tokens, settings, plan)
    num_nodes = plan.num_nodes if plan is not None else 0
    cache = target.build_cache(length + max_new_tokens + num_nodes + 1)
    taps = draft.target_layer_ids if draft is not None else ()
    chooser = Chooser(settings, target.device, generator)
    clock = _Clock()
    prefill = target.prefill(
        inputs,
        cache,
        target_layer_ids=taps,
        want_importance=draft is not None and draft.wants_importance,
    )
    chooser.note(inputs.input_ids_T)
    root_1 = chooser.choose(prefill.logits_V[None])
    chooser.note(root_1)
    end = _End(target, max_new_tokens, stop_ids, settings)
    tokens = end.cut(root_1.tolist())
    yield Step(tokens, end.ended, end.stopped, clock.lap(), None, prefill, None)
    if end.ended:
        return
    clock.restart()
    if draft is None or plan is None:
        rounds: Rounds = Plain(target, cache, chooser, root_1)
    else:
        session = draft.open_session(target, plan, length + max_new_tokens + 1)
        if parts is not None:
            parts.start()
        session.prefill(prefill, root_1, inputs)
        if parts is not None:
            parts.lap("sync")
        shared = (target, cache, chooser, root_1, session, taps, parts)
        if isinstance(plan, DynamicPlan):
            rounds = Grown(plan, *shared)
        elif isinstance(plan, AdaptivePlan):
            rounds = Adaptive(plan, *shared)
        elif settings.draws_drafts:
            rounds = SampledChain(plan, *shared)
        else:
            rounds = Speculative(plan, *shared)
    del prefill  # its features are as long as the prompt
    while not end.ended:
        gain = rounds.run_one()
        tokens = end.cut(gain.tokens)
        seconds = clock.lap()
        done = Round(gain.drafted, gain.path, seconds, gain.parents, gain.scores)
        yield Step(tokens, end.ended, end.stopped, seconds, done, None, gain.features_AF)
        clock.restart()


class _End:
    """Where one answer ends."""

    def __init__(
        self,
        target: Target,
        limit: int,
        stop_ids: Sequence[int] | None,
        settings: GenerationSettings,
    ) -> None:
        self.ended = self.stopped = False
        self._limit, self._num_before = limit, 0
        self._ids = frozenset(target.spec.eos_token_ids if stop_ids is None else stop_ids)
        self._strings = (
            StopStrings(settings.stop_strings, target.decode_text)
            if settings.stop_strings
            else None
        )

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens of a block that belong to the answer."""
        kept, self.ended = cut_at_stop(tokens, self._num_before, self._limit, self._ids)
        found = None if self._strings is None else self._strings.find(kept)
        if found is not None:
            kept, self.ended = kept[:found], True
        self._num_before += len(kept)
        self.stopped = self.ended and bool(kept) and (found is not None or kept[-1] in self._ids)
        return kept


def decode(
    target: Target,
    inputs: TargetInputs,
    *,
    max_new_tokens: int,
    draft: Drafter | None = None,
    plan: Plan | None = None,
    stop_ids: Sequence[int] | None = None,
    settings: GenerationSettings = GREEDY,
    generator: torch.Generator | None = None,
    want_record: bool = False,
    parts: Parts | None = None,
) -> DecodeResult:
    """Decode one prompt; with a draft, speculatively and with the same result.

    When sampling it is the distribution of the result that is the same. See `decode_steps`.

    Args:
        target: The model whose answer is wanted.
        inputs: The prompt.
        max_new_tokens: Most tokens to generate, 0 or more.
        draft: Who proposes; None is plain decoding.
        plan: The draft tree; belongs to `draft`.
        stop_ids: End tokens; the target's own when None.
        settings: How tokens are chosen, and stop strings.
        generator: Random numbers of this request; torch's global ones when None.
        want_record: Keep the tapped features of all positions.
        parts: Watches what rounds with a draft spend their time on.

    Raises:
        UserError: As `decode_steps`.
    """
    collector = Collector(want_record)
    for step in decode_steps(
        target,
        inputs,
        max_new_tokens=max_new_tokens,
        draft=draft,
        plan=plan,
        stop_ids=stop_ids,
        settings=settings,
        generator=generator,
        parts=parts,
    ):
        collector.add(step)
    return collector.result()


class Collector:
    """Gathers the steps of one answer."""

    def __init__(self, want_record: bool = False) -> None:
        self._want_record = want_record
        self._tokens: list[int] = []
        self._rounds: list[Round] = []
        self._record: DecodeRecord | None = None
        self._prefill_s, self._stopped = 0.0, False

    def add(self, step: Step) -> None:
        """Take the next step."""
        self._tokens += step.tokens
        self._stopped = step.stopped
        if step.prefill is not None:
            self._prefill_s = step.seconds
            self._record = DecodeRecord(step.prefill) if self._want_record else None
        if step.round is not None:
            self._rounds.append(step.round)
        if self._record is not None and step.features_AF is not None:
            self._record.features.append(step.features_AF)

    def result(self) -> DecodeResult:
        """All of it."""
        return DecodeResult(
            tokens=self._tokens,
            rounds=self._rounds,
            prefill_s=self._prefill_s,
            decode_s=sum(r.seconds for r in self._rounds),
            stopped=self._stopped,
            record=self._record,
        )


def build_plan(tree: StaticTree, target: Target) -> TreePlan | None:
    """The plan of a tree on a target's device and dtype; None for the empty tree."""
    return build_tree_plan(tree, target.device, target.dtype) if tree.num_nodes else None
