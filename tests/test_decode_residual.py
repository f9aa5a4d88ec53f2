"""Acceptance of drafted tokens when sampling: the law of the output is exactly the target's.

False alarms: the chi-square tests use fixed seeds, so they either pass always or never; for fresh
seeds each of them would fail a right implementation once in 10,000 runs.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from dreams_nas.decode.accept import accept_greedy
from dreams_nas.decode.choose import Chooser
from dreams_nas.decode.plan import TreePlan, build_tree_plan
from dreams_nas.decode.residual import Verdict, block_verdict, num_kept, residual_verdict
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.space.tree import StaticTree

VOCABULARY = 16
NUM_LEVELS = 3
ALARM = 1e-4
Judge = Callable[[Tensor, Tensor, Tensor], Verdict]
JUDGES: dict[str, Judge] = {"residual": residual_verdict, "block": block_verdict}


def laws(vocabulary: int, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Markov laws [V, V] of the next token given the last one: the target's and a draft's.

    The draft knows the first `share` of the vocabulary only.
    """
    generator = torch.Generator().manual_seed(seed)
    target, noise = (
        torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    draft = 0.7 * target + 0.7 * noise
    draft[:, round(share * vocabulary) :] = -torch.inf
    return (1.5 * target).softmax(dim=-1), (1.5 * draft).softmax(dim=-1)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("rule", JUDGES)
def test_the_law_of_what_is_written_is_exactly_the_targets(rule: str, share: float) -> None:
    """All drafts and verdicts of a small vocabulary, added up: no randomness, fp64."""
    vocabulary, length = 4, 3
    target, draft = laws(vocabulary, share, seed=1)
    written = torch.zeros((vocabulary,) * (length + 1), dtype=torch.float64)
    for tokens in product(range(vocabulary), repeat=length):
        before = (0, *tokens[:-1])
        chance = float(
            torch.stack([draft[a, b] for a, b in zip(before, tokens, strict=True)]).prod()
        )
        if chance == 0:
            continue
        verdict = JUDGES[rule](torch.tensor(tokens), draft[list(before)], target[[0, *tokens]])
        for kept, likely in enumerate(_lengths(verdict.accept_L.tolist(), rule == "block")):
            for token in range(vocabulary):
                weight = chance * likely * float(verdict.next_QV[kept, token])
                _add(written, (*tokens[:kept], token), weight, target)
    expected = torch.zeros_like(written)
    _add(expected, (), 1.0, target)
    torch.testing.assert_close(written, expected, rtol=0, atol=1e-12)


def _lengths(accept: list[float], is_block: bool) -> list[float]:
    """How likely 0..L tokens are kept."""
    found = []
    for kept in range(len(accept) + 1):
        if is_block:  # the last test that passes
            likely = accept[kept - 1] if kept else 1.0
            for later in accept[kept:]:
                likely *= 1 - later
        else:  # up to the first test that fails
            likely = 1 - accept[kept] if kept < len(accept) else 1.0
            for earlier in accept[:kept]:
                likely *= earlier
        found.append(likely)
    return found


def _add(written: Tensor, begun: tuple[int, ...], weight: float, target: Tensor) -> None:
    """Spread the weight of a beginning over its continuations, drawn from the target."""
    if len(begun) == written.ndim:
        written[begun] += weight
        return
    last = begun[-1] if begun else 0
    for token in range(len(target)):
        _add(written, (*begun, token), weight * float(target[last, token]), target)


def test_block_verification_keeps_more_than_judging_tokens_alone() -> None:
    target, draft = laws(VOCABULARY, 1.0)
    kept = {rule: _rounds(rule, target, draft, 1500)[1].float().mean() for rule in JUDGES}
    assert kept["block"] > kept["residual"] + 0.05


def _draw(law: Tensor, last: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(law[last], 1, generator=generator)[:, 0]


def _rounds(rule: str, target: Tensor, draft: Tensor, num_rounds: int) -> tuple[Tensor, Tensor]:
    """Tokens after token 0, one round each and then the target alone; how many were drafted."""
    generator = torch.Generator().manual_seed(3)
    drafted = [torch.zeros(num_rounds, dtype=torch.int64)]
    for _ in range(NUM_LEVELS):
        drafted.append(_draw(draft, drafted[-1], generator))
    written = torch.full((num_rounds, NUM_LEVELS + 1), -1)
    kept = torch.zeros(num_rounds, dtype=torch.int64)
    for i, tokens in enumerate(torch.stack(drafted, dim=1)):
        if rule == "tree":
            gained, kept[i] = _tree_round(target, draft, generator)
        else:
            verdict = JUDGES[rule](tokens[1:], draft[tokens[:-1]], target[tokens])
            kept[i] = num_kept(verdict, rule == "block", generator)
            bonus = torch.multinomial(verdict.next_QV[kept[i]], 1, generator=generator)
            gained = torch.cat([tokens[1 : kept[i] + 1], bonus])
        written[i, : len(gained)] = gained
    for place in range(1, NUM_LEVELS + 1):  # a round ends early or late; the target writes on
        more = _draw(target, written[:, place - 1], generator)
        written[:, place] = torch.where(written[:, place] < 0, more, written[:, place])
    return written, kept


TREE = StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def _tree_round(target: Tensor, draft: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """One round of a tree of the draft's best guesses, accepted by match."""
    tokens = [0]
    for path, parent in zip(TREE.paths, TREE.parents, strict=True):
        tokens.append(int(draft[tokens[parent + 1]].topk(path[-1] + 1).indices[-1]))
    chooser = Chooser(GenerationSettings(do_sample=True), torch.device("cpu"), generator)
    chosen = chooser.choose(target[tokens].log()).tolist()
    rows, gained = accept_greedy(_plan().children, tokens[1:], chosen)
    return torch.tensor(gained), len(rows) - 1


@cache
def _plan() -> TreePlan:
    return build_tree_plan(TREE, torch.device("cpu"), torch.float64)


def chi_square(rule: str, share: float, num_draws: int) -> list[float]:
    """The p-value of each place 1..4 of what rounds write, the bonus token included."""
    target, draft = laws(VOCABULARY, share, seed=2)
    written, _ = _rounds(rule, target, draft, num_draws)
    law = torch.zeros(VOCABULARY, dtype=torch.float64)
    law[0] = 1
    values = []
    for place in range(NUM_LEVELS + 1):
        law = law @ target
        counts, expected = written[:, place].bincount(minlength=VOCABULARY), law * num_draws
        distance = ((counts - expected) ** 2 / expected).sum()
        half = torch.tensor((VOCABULARY - 1) / 2, dtype=torch.float64)
        values.append(float(torch.special.gammaincc(half, distance / 2)))
    return values


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("rule", ["residual", "block", "tree"])
def test_chi_square_of_every_rule(rule: str, share: float) -> None:
    assert min(chi_square(rule, share, 20_000)) > ALARM


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("rule", ["residual", "block", "tree"])
def test_chi_square_of_every_rule_at_length(rule: str, share: float) -> None:
    values = chi_square(rule, share, 200_000)
    print(f"{rule}, vocabulary share {share}: p-values {', '.join(f'{v:.3f}' for v in values)}")
    assert min(values) > ALARM


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bonus tokens drawn from the target itself instead of the rest of it."""

    def faulty(tokens: Tensor, draft: Tensor, target: Tensor) -> Verdict:
        return residual_verdict(tokens, draft, target)._replace(next_QV=target)

    monkeypatch.setitem(JUDGES, "residual", faulty)
    assert min(chi_square("residual", 1.0, 5_000)) < ALARM


def test_a_draft_equal_to_the_target_is_always_kept() -> None:
    target, _ = laws(VOCABULARY, 1.0)
    for rule in JUDGES:
        assert (_rounds(rule, target, target, 50)[1] == NUM_LEVELS).all()


def test_what_the_target_never_says_is_never_kept() -> None:
    """A zero probability gives no NaN, and where nothing is left the target's own law is taken."""
    target = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    draft = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    for judge in JUDGES.values():
        verdict = judge(torch.tensor([0]), draft, target)
        assert verdict.accept_L.tolist() == [0.0]
        assert verdict.next_QV[0].tolist() == [0.0, 1.0, 0.0]
        same = judge(torch.tensor([1]), target[:1], target)
        assert same.accept_L.tolist() == [1.0]
        assert same.next_QV[0].tolist() == [0.0, 1.0, 0.0]
