"""Sampling and penalties through the whole engine: what is drawn never depends on the draft."""

from typing import Any

import pytest
import torch
from draft_models import TREES, build_loud_target, build_ready, draw_by_law
from target_models import build_prompt, build_target
from torch import Tensor
from transformers import LogitsProcessorList

from dreams_nas.core.config import build_config
from dreams_nas.core.errors import UserError
from dreams_nas.decode import choose
from dreams_nas.decode.choose import Chooser, build_warpers, seeded
from dreams_nas.decode.engine import DecodeResult, build_plan, decode
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.draft.layers import head
from dreams_nas.space.arch import DraftArch
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs

ARCH = DraftArch(tap="last", depth=1, vocab=0.5)
NUM_NEW = 30
SETTINGS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 4, "temperature": 0.8},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.3},
    "all": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("tree", TREES)
def test_a_tree_draws_what_plain_decoding_draws(
    tree: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With draws that depend on the distribution alone, both arms write the same tokens."""
    monkeypatch.setattr(Chooser, "draw", draw_by_law)
    target = build_loud_target("llava", seed=2)
    chosen = GenerationSettings(do_sample=True, **SETTINGS[settings])
    inputs = build_prompt(target, 1)
    plain = decode(target, inputs, max_new_tokens=NUM_NEW, settings=chosen, stop_ids=())
    fast = _speculate(target, inputs, tree, chosen)
    assert fast.tokens == plain.tokens
    assert len(set(plain.tokens)) > 3
    if tree == "bushy":
        assert len(fast.rounds) < len(plain.rounds)


def _speculate(
    target: HuggingFaceTarget,
    inputs: TargetInputs,
    tree: str,
    chosen: GenerationSettings,
    seed: int = 0,
) -> DecodeResult:
    return decode(
        target,
        inputs,
        max_new_tokens=NUM_NEW,
        draft=build_ready(target, ARCH),
        plan=build_plan(TREES[tree], target),
        settings=chosen,
        generator=seeded(seed, target.device),
        stop_ids=(),
    )


@pytest.mark.parametrize("fault", ["warp", "path"])
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An un-warped bonus token, and a penalty that forgets the path of a row."""
    monkeypatch.setattr(Chooser, "draw", draw_by_law)
    target = build_loud_target("llava", seed=2)
    chosen = GenerationSettings(do_sample=True, temperature=0.8, repetition_penalty=2.0)
    prompts = [build_prompt(target, 1, seed=seed) for seed in range(8)]
    plain = [
        decode(target, inputs, max_new_tokens=NUM_NEW, settings=chosen, stop_ids=()).tokens
        for inputs in prompts
    ]
    assert [_speculate(target, inputs, "bushy", chosen).tokens for inputs in prompts] == plain
    if fault == "path":
        real = Chooser._scores
        monkeypatch.setattr(Chooser, "_scores", lambda s, logits, paths: real(s, logits, None))
    else:
        real_choose = Chooser.choose

        def unwarped(self: Chooser, logits_QV: Tensor, paths_QL: Tensor | None = None) -> Tensor:
            tokens_Q = real_choose(self, logits_QV, paths_QL)
            tokens_Q[-1] = self.draw(logits_QV[-1:].softmax(-1))[0]
            return tokens_Q

        monkeypatch.setattr(Chooser, "choose", unwarped)
    assert [_speculate(target, inputs, "bushy", chosen).tokens for inputs in prompts] != plain


@pytest.mark.parametrize("tree", TREES)
def test_greedy_decoding_with_a_penalty_equals_transformers(tree: str) -> None:
    target = build_loud_target("llama", seed=1)
    inputs = build_prompt(target)
    chosen = GenerationSettings(repetition_penalty=1.4)
    plain = decode(target, inputs, max_new_tokens=NUM_NEW, settings=chosen, stop_ids=())
    theirs = target.model.generate(
        inputs.input_ids_T[None],
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        repetition_penalty=1.4,
    )
    assert plain.tokens == theirs[0, len(inputs.input_ids_T) :].tolist()
    assert plain.tokens != decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=()).tokens
    assert _speculate(target, inputs, tree, chosen).tokens == plain.tokens


@pytest.mark.parametrize("acceptance", ["match", "residual", "block"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 1e-9}, {"temperature": 1e-300}, {"top_k": 1}, {"temperature": 0.0}]
)
def test_sampling_without_choice_is_greedy(settings: dict[str, Any], acceptance: str) -> None:
    """Tiny temperatures give no NaN, whatever the rule."""
    target = build_loud_target("llava", dtype=torch.float32)
    inputs = build_prompt(target, 1)
    greedy = decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=())
    chosen = GenerationSettings(do_sample=True, acceptance=acceptance, **settings)
    assert _speculate(target, inputs, "chain", chosen).tokens == greedy.tokens


@pytest.mark.parametrize("acceptance", ["match", "residual", "block"])
def test_a_seed_repeats_an_answer_and_another_changes_it(acceptance: str) -> None:
    target = build_loud_target("llava")
    inputs = build_prompt(target, 1)
    chosen = GenerationSettings(do_sample=True, temperature=2.0, acceptance=acceptance)
    answers = [_speculate(target, inputs, "chain", chosen, seed).tokens for seed in (1, 1, 2)]
    torch.manual_seed(9)  # torch's own generator has no part in it
    assert _speculate(target, inputs, "chain", chosen, 1).tokens == answers[0]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("acceptance", ["residual", "block"])
def test_a_chain_drawn_by_the_draft_keeps_the_targets_law(acceptance: str) -> None:
    """Through the engine: the third and fourth token of many short answers, in several rounds.

    False alarms: one in 10,000 for fresh seeds; these are fixed.
    """
    target = build_loud_target("llama", dtype=torch.float32)
    inputs = build_prompt(target, num_text=6)
    chosen = GenerationSettings(do_sample=True, top_k=4, temperature=1.5, acceptance=acceptance)
    draft, plan = build_ready(target, ARCH), build_plan(TREES["chain"], target)
    num_answers = 700
    generator = seeded(5, target.device)
    seen: dict[bool, dict[tuple[int, ...], int]] = {True: {}, False: {}}
    for speculates in seen:
        for _ in range(num_answers):
            tokens = tuple(
                decode(
                    target,
                    inputs,
                    max_new_tokens=4,
                    draft=draft if speculates else None,
                    plan=plan if speculates else None,
                    settings=chosen,
                    generator=generator,
                    stop_ids=(),
                ).tokens
            )
            seen[speculates][tokens[2:]] = seen[speculates].get(tokens[2:], 0) + 1
    distance, cells = 0.0, 0
    for tokens in sorted({*seen[True], *seen[False]}):
        a, b = (seen[kind].get(tokens, 0) for kind in (True, False))
        if a + b >= 10:
            distance, cells = distance + (a - b) ** 2 / (a + b), cells + 1
    half = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    assert cells > 8
    assert float(torch.special.gammaincc(half, torch.tensor(distance / 2).double())) > 1e-4


def test_warpers_are_those_of_transformers() -> None:
    target = build_target("llama")
    values = {"temperature": 0.7, "top_k": 11, "top_p": 0.8, "min_p": 0.03}
    config = target.model.generation_config
    for name, value in {"do_sample": True, **values}.items():
        setattr(config, name, value)
    theirs = target.model._get_logits_processor(config, input_ids_seq_length=3)
    ours = build_warpers(GenerationSettings(do_sample=True, **values))
    assert [type(x) for x in ours] == [type(x) for x in theirs]
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(5, 1, dtype=torch.int64)
    assert isinstance(ours, LogitsProcessorList)
    torch.testing.assert_close(ours(ids, logits), theirs(ids, logits))


def test_settings_of_the_targets_config_apply_unless_others_are_given() -> None:
    target = build_loud_target("llama")
    inputs = build_prompt(target)
    greedy = decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=())
    config = target.model.generation_config
    config.repetition_penalty = 1.4
    penalised = decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=())
    assert penalised.tokens != greedy.tokens
    given = GenerationSettings(repetition_penalty=1.0)
    free = decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=(), settings=given)
    assert free.tokens == greedy.tokens
    config.repetition_penalty, config.top_k = None, 1
    sampled = GenerationSettings(do_sample=True)
    again = decode(target, inputs, max_new_tokens=NUM_NEW, stop_ids=(), settings=sampled)
    assert again.tokens == greedy.tokens


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 2}, "min_p = 2"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0"),
        ({"acceptance": "blok"}, "acceptance = blok"),
        ({"temprature": 1}, "did you mean 'temperature'?"),
    ],
)
def test_impossible_settings_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        build_config(GenerationSettings, values, "the call")


@pytest.mark.parametrize("acceptance", ["residual", "block"])
def test_rules_for_chains_refuse_a_tree_before_the_prefill(acceptance: str) -> None:
    target = build_loud_target("llama")
    chosen = GenerationSettings(do_sample=True, acceptance=acceptance)
    with pytest.raises(UserError, match=f"'{acceptance}' needs a chain"):
        _speculate(target, build_prompt(target), "bushy", chosen)


def test_the_draft_is_warped_as_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn chains use the request's temperature and top-k on the draft's logits, too."""
    target = build_loud_target("llama")
    draft = build_ready(target, ARCH)
    seen: list[Tensor] = []
    real = choose.Chooser.warp

    def warp(self: Chooser, scores_QV: Tensor) -> Tensor:
        found = real(self, scores_QV)
        if scores_QV.shape[-1] == len(head(draft.weights, torch.zeros(1, 32).double())[0]):
            seen.append(found)
        return found

    monkeypatch.setattr(Chooser, "warp", warp)
    chosen = GenerationSettings(do_sample=True, top_k=3, acceptance="residual")
    _speculate(target, build_prompt(target), "chain", chosen)
    assert seen
    assert all(int((probabilities > 0).sum()) == 3 for probabilities in seen)


@pytest.mark.parametrize("name", ["typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"])
def test_warping_that_is_not_known_here_is_refused_when_sampling(name: str) -> None:
    target = build_loud_target("llama")
    setattr(target.model.generation_config, name, 0.3)
    decode(target, build_prompt(target), max_new_tokens=3)
    sampled = GenerationSettings(do_sample=True)
    with pytest.raises(UserError, match=name):
        decode(target, build_prompt(target), max_new_tokens=3, settings=sampled)


def test_draws_follow_their_distribution() -> None:
    """One in 10,000 right implementations fails with a fresh seed; this one is fixed."""
    law = torch.tensor([0.5, 0.0, 0.2, 0.25, 0.05])
    cpu = torch.device("cpu")
    chooser = Chooser(GenerationSettings(do_sample=True), cpu, seeded(1, cpu))
    counts = chooser.draw(law.expand(20_000, -1)).bincount(minlength=5).double()
    assert counts[1] == 0
    kept = law > 0
    expected = 20_000 * law[kept].double()
    distance = ((counts[kept] - expected) ** 2 / expected).sum()
    assert float(torch.special.gammaincc(torch.tensor(1.5).double(), distance / 2)) > 1e-4


def test_a_penalty_is_computed_in_single_precision() -> None:
    cpu = torch.device("cpu")
    chooser = Chooser(GenerationSettings(repetition_penalty=1.1), cpu)
    chooser.note(torch.tensor([0]))
    # 4.4 / 1.1 is 4.0; the neighbour 3.984 is the next lower bf16 number
    logits = torch.tensor([[4.40625, 4.0, 1.0]], dtype=torch.bfloat16)
    assert int(chooser.choose(logits)) == 0
