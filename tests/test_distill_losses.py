"""The fast loss has value and gradient of the readable one, and supervises what it should."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recordings import made_up_recording, shake

from dreams_nas.distill import fused_kl as fused_module
from dreams_nas.distill.losses import (
    build_supervision,
    chain_acceptance_length,
    draft_loss,
    position_weights,
    reference_kl,
)
from dreams_nas.distill.recipes import NAMED_RECIPES, Recipe
from dreams_nas.draft.body import DraftBody
from dreams_nas.draft.layers import head
from dreams_nas.draft.unroll import unroll
from dreams_nas.replay.batched import index_in_order
from dreams_nas.replay.batches import AnswerBatch, build_batch

HIDDEN, VOCAB = 16, 40
LAYERS = (0, 1)


class Problem:
    """A small draft and three answers, in fp64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        self.head_weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        self.order = torch.randperm(VOCAB, generator=generator)
        self.body = DraftBody(
            hidden=HIDDEN,
            num_taps=2,
            depth=2,
            num_heads=4,
            num_kv_heads=2,
            ffn=24,
            inv_freq=torch.tensor([1.0, 0.1]),
            eps=1e-5,
        ).double()
        shake(self.body)
        answers = [[3, 9, 4, 7, 9, 1], [5, 2], [8, 8, 3, 0]]
        self.recordings = [
            made_up_recording(answer, prompt=[1, 2, 3, 4][: 2 + i], hidden=HIDDEN, seed=i)
            for i, answer in enumerate(answers)
        ]
        self.batch: AnswerBatch = build_batch(
            self.recordings, LAYERS, 1.0, self.embed, dtype=torch.float64
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens]

    def target_head(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.head_weight)

    def weights(self, num_vocab: int = VOCAB) -> Any:
        return self.body.weights(self.head_weight[self.order[:num_vocab]])

    def supervision(self) -> Any:
        inverse = index_in_order(self.order)
        found = build_supervision(self.batch, self.target_head, self.order, inverse)
        exact = self.target_head(found.states_ND)[:, self.order]
        return type(found)(**{**vars(found), "logits_NV": exact})

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, list(self.body.parameters())))


@pytest.fixture
def problem() -> Problem:
    return Problem()


@pytest.mark.parametrize("chunk", [1, 1 << 19])
@pytest.mark.parametrize("decay", [1.0, 0.8])
@pytest.mark.parametrize("num_vocab", [VOCAB, 13])
def test_fast_loss_equals_the_reference_in_value_and_gradient(
    problem: Problem, num_vocab: int, decay: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_module, "_CHUNK_ELEMENTS", chunk)
    recipe = Recipe(num_unroll_levels=3, level_decay=decay)
    weights = problem.weights(num_vocab)
    fast = draft_loss(weights, problem.batch, problem.supervision(), problem.embed, recipe)
    readable = reference_kl(
        weights,
        problem.batch,
        problem.target_head,
        problem.order[:num_vocab],
        problem.embed,
        recipe.level_weights,
    )
    torch.testing.assert_close(fast.total, readable, rtol=1e-6, atol=1e-7)
    pairs = zip(problem.gradients(fast.total), problem.gradients(readable), strict=True)
    for own, wanted in pairs:
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-7)
        assert wanted.abs().max() > 0


def test_vocabulary_levels_and_decay_all_matter(problem: Problem) -> None:
    def value(num_vocab: int = VOCAB, **options: Any) -> float:
        recipe = Recipe(**options)
        loss = draft_loss(
            problem.weights(num_vocab), problem.batch, problem.supervision(), problem.embed, recipe
        )
        return float(loss.total.detach())

    values = [
        value(),
        value(13),
        value(num_unroll_levels=2),
        value(level_decay=0.5),
        value(kl_weight=0.5),
        value(feature_weight=0.2),
    ]
    assert len({round(v, 6) for v in values}) == len(values)


def test_feature_loss_compares_with_the_state_that_gives_the_distribution(problem: Problem) -> None:
    recipe = Recipe(num_unroll_levels=2, kl_weight=0.0, feature_weight=1.0)
    weights = problem.weights()
    loss = draft_loss(weights, problem.batch, problem.supervision(), problem.embed, recipe)
    assert loss.feature is not None
    wanted, count = torch.zeros((), dtype=torch.float64), 0
    for sample, recording in enumerate(problem.recordings):
        last = recording.features((1,))
        own = recording.num_answer_tokens - 1
        for level, states in enumerate(unroll(weights, problem.batch.rows, problem.embed, 2), 1):
            for root in range(own - (level - 1)):
                position = recording.prompt_length + root + level - 1
                state = states[sample, states.shape[1] - own + root]
                wanted = wanted + F.smooth_l1_loss(state, last[position])
                count += 1
    torch.testing.assert_close(loss.total, wanted / count, rtol=1e-6, atol=1e-7)


def test_every_root_but_no_user_turn_is_supervised(problem: Problem) -> None:
    supervision = problem.supervision()
    is_drafted_NL, weights_NL = position_weights(supervision, VOCAB, [1.0, 1.0, 1.0])
    # Answers of 6, 2 and 4 tokens: one less at level 1, and one less again at every level.
    assert is_drafted_NL.sum(0).tolist() == [5 + 1 + 3, 4 + 0 + 2, 3 + 0 + 1]
    assert float(weights_NL.sum()) == pytest.approx(1)
    inside = problem.order[supervision.row_N].tolist()
    assert inside == [9, 4, 7, 9, 1, 2, 8, 3, 0]


def test_tokens_outside_the_vocabulary_have_no_weight_and_are_misses(problem: Problem) -> None:
    supervision = problem.supervision()
    kept = int(supervision.row_N.median()) + 1
    _, weights_NL = position_weights(supervision, kept, [1.0])
    outside = supervision.row_N >= kept
    assert outside.any()
    assert (~outside).any()
    assert (weights_NL[outside] == 0).all()
    assert (weights_NL[~outside] > 0).all()
    loss = draft_loss(
        problem.weights(kept),
        problem.batch,
        supervision,
        problem.embed,
        Recipe(num_unroll_levels=1),
    )
    assert not loss.hits_NL[outside].any()
    nothing = draft_loss(
        problem.weights(1), problem.batch, supervision, problem.embed, Recipe(num_unroll_levels=1)
    )
    assert torch.isfinite(nothing.total)


def test_hits_and_acceptance_estimate_equal_a_count_by_hand(problem: Problem) -> None:
    supervision, weights = problem.supervision(), problem.weights()
    loss = draft_loss(
        weights, problem.batch, supervision, problem.embed, Recipe(num_unroll_levels=3)
    )
    accepted, num_roots = 0, 0
    levels = [head(weights, s) for s in unroll(weights, problem.batch.rows, problem.embed, 3)]
    for sample, recording in enumerate(problem.recordings):
        answer = recording.tokens_T[recording.prompt_length :].tolist()
        own = len(answer) - 1
        num_roots += own
        for root in range(own):
            for level in range(1, 4):
                if root + level >= len(answer):
                    break
                logits = levels[level - 1][sample, levels[0].shape[1] - own + root]
                if int(problem.order[logits.argmax()]) != answer[root + level]:
                    break
                accepted += 1
    tau = chain_acceptance_length(loss, supervision, problem.batch.next_tokens_BR.numel())
    assert tau == pytest.approx(1 + accepted / num_roots)


def test_perfect_draft_has_no_loss_and_hits_everything(problem: Problem) -> None:
    supervision = problem.supervision()
    logits = supervision.logits_NV.clone()
    best = logits.argmax(dim=-1)
    states = supervision.states_ND[:, None].clone().requires_grad_()
    total, hits = fused_module.fused_kl(
        states,
        problem.head_weight[problem.order],
        logits,
        best,
        torch.full((len(best), 1), 1 / len(best), dtype=torch.float64),
        torch.float64,
    )
    total.backward()
    assert float(total.detach()) == pytest.approx(0, abs=1e-9)
    assert states.grad is not None
    assert float(states.grad.abs().max()) < 1e-9
    assert hits.all()


def test_named_recipes_differ_as_published() -> None:
    searched, eagle, eagle3 = (NAMED_RECIPES[n] for n in ("searched", "eagle", "eagle3"))
    assert searched.level_weights == (1.0,) * 7
    assert searched.feature_weight == eagle3.feature_weight == 0
    assert eagle.feature_weight > 0
    assert eagle.num_unroll_levels == 1
    assert eagle3.level_weights == pytest.approx([0.8**d for d in range(7)])
    assert all(r.betas == (0.9, 0.95) and r.grad_clip == 0.5 for r in NAMED_RECIPES.values())


def test_recipe_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_weight and feature_weight are both 0"):
        Recipe(kl_weight=0.0)
