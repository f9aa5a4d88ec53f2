"""Training of the embedded target: resuming, refusing, and that it learns."""

from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dreams_nas.core.errors import RunError, UserError
from dreams_nas.targets.embedded import train as training
from dreams_nas.targets.embedded.checkpoint import read_checkpoint, save_checkpoint
from dreams_nas.targets.embedded.evaluate import evaluate, load_target
from dreams_nas.targets.embedded.learning import Schedule
from dreams_nas.targets.embedded.model import build_config
from dreams_nas.targets.embedded.tokens import build_tokenizer
from dreams_nas.targets.embedded.train import Trainer, train

SHORT = Schedule(
    vision_steps=2,
    vision_batch=2,
    steps=3,
    batch=1,
    max_tokens=220,
    probe_batch=1,
    warmup=1,
    rate=2e-3,
)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(num_charts=60)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trained model two layers deep."""

    def build_small(tokenizer: PreTrainedTokenizerFast) -> object:
        config = build_config(tokenizer)
        config.text_config.num_hidden_layers = 2
        config.vision_config.num_hidden_layers = 1
        return config

    monkeypatch.setattr(training, "build_config", build_small)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    stop: int, tmp_path: Path
) -> None:
    whole = Trainer(SHORT, _tokenizer())
    for step in range(SHORT.total_steps):
        whole.step(step)

    killed = Trainer(SHORT, _tokenizer())
    for step in range(stop):
        killed.step(step)
    save_checkpoint(tmp_path, stop, asdict(SHORT), killed.modules, killed.optimiser)
    resumed = Trainer(SHORT, _tokenizer())
    checkpoint = read_checkpoint(tmp_path, asdict(SHORT))
    assert checkpoint is not None
    assert checkpoint.step == stop
    checkpoint.restore(resumed.modules, resumed.optimiser)
    for step in range(stop, SHORT.total_steps):
        resumed.step(step)

    for name, tensor in _weights(whole).items():
        assert torch.equal(tensor, _weights(resumed)[name]), name


def test_the_first_phase_trains_seeing_and_the_second_everything() -> None:
    trainer = Trainer(SHORT, _tokenizer())
    before = _weights(trainer)
    trainer.step(0)
    after = _weights(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("vision_tower" in name for name in changed)
    assert any("projector" in name for name in changed)
    assert not any("language_model" in name for name in changed)
    trainer.step(SHORT.vision_steps)
    final = _weights(trainer)
    layers = [n for n in before if "language_model.layers" in n and "proj" in n]
    assert layers
    assert not any(torch.equal(after[name], final[name]) for name in layers)


def test_training_learns() -> None:
    """The same sequence again and again: its answers are learned by heart."""
    trainer = Trainer(replace(SHORT, rate=5e-3), _tokenizer())
    losses = [trainer.step(SHORT.vision_steps)["answer"] for _ in range(12)]
    assert losses[-1] < 0.6 * losses[0]


def test_another_schedule_is_refused_and_its_fields_are_named(tmp_path: Path) -> None:
    trainer = Trainer(SHORT, _tokenizer())
    save_checkpoint(tmp_path, 0, asdict(SHORT), trainer.modules, trainer.optimiser)
    other = replace(SHORT, batch=7, rate=0.5)
    with pytest.raises(UserError, match=r"batch was 1 and is now 7, rate was 0\.002 and is now 0"):
        train(tmp_path, other, tokenizer=_tokenizer(), quiet=True)


def test_a_damaged_checkpoint_fails_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(RunError, match=r"checkpoint\.safetensors is not a readable checkpoint"):
        train(tmp_path, SHORT, tokenizer=_tokenizer(), quiet=True)


def test_a_run_ends_with_a_folder_that_can_be_loaded_and_evaluated(tmp_path: Path) -> None:
    folder = train(tmp_path, SHORT, tokenizer=_tokenizer(), quiet=True)
    model, processor = load_target(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert processor.tokenizer.get_vocab() == _tokenizer().get_vocab()
    # finished: the same command only writes the folder again
    assert train(tmp_path, SHORT, tokenizer=_tokenizer(), quiet=True) == folder


def test_rates_rise_and_fall_in_both_phases() -> None:
    schedule = Schedule()
    assert schedule.rates(0)[0] < schedule.rates(149)[0]
    assert schedule.rates(schedule.vision_steps - 1)[0] < 0.2 * schedule.vision_rate
    assert schedule.rates(schedule.vision_steps - 1)[1] == 0.0
    seeing, decoding = schedule.rates(schedule.vision_steps + 200)
    assert 0.9 * schedule.rate < decoding <= schedule.rate
    assert seeing == pytest.approx(schedule.vision_share * decoding)
    assert schedule.rates(schedule.total_steps - 1)[1] < 0.05 * schedule.rate


def test_the_decoders_probe_fades_away() -> None:
    schedule = Schedule()
    first, last = schedule.vision_steps, schedule.total_steps
    assert schedule.probe_weights(first) == (schedule.probe_weight, schedule.text_probe_weight)
    assert schedule.probe_weights(last) == (schedule.probe_weight, 0.0)


def test_evaluating_a_folder_without_a_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no target \(no config\.json\); train one with"):
        evaluate(tmp_path)
