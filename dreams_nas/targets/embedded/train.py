"""Training of the embedded target: vision tower with a probe first, then the whole model.

Data never repeat: step s of a phase reads its own chart numbers, so a resumed run sees what an
uninterrupted one would have seen.
"""

import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from dreams_nas.core.console import say
from dreams_nas.core.files import atomic_dir
from dreams_nas.targets.embedded.charts import build_chart
from dreams_nas.targets.embedded.checkpoint import read_checkpoint, save_checkpoint
from dreams_nas.targets.embedded.learning import (
    Probe,
    Schedule,
    TextProbe,
    image_features,
    step_loss,
)
from dreams_nas.targets.embedded.model import build_config, build_model
from dreams_nas.targets.embedded.packing import Packer, seen_by_probe
from dreams_nas.targets.embedded.tokens import build_processor, build_tokenizer

SAVE_EVERY_S = 180.0
"""Seconds between checkpoints."""
WEIGHTS = "weights"
"""Folder of the finished target inside the run folder."""


class Trainer:
    """The state of a run and its steps."""

    def __init__(self, schedule: Schedule, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(schedule.seed)
        self.schedule = schedule
        self.tokenizer = tokenizer
        self.model = build_model(build_config(tokenizer))
        text = self.model.config.text_config
        self.probe = Probe(text.hidden_size)
        self.text_probe = TextProbe(text.hidden_size, text.num_hidden_layers)
        self.packer = Packer(tokenizer, schedule.max_tokens, schedule.seed)
        self.optimiser = torch.optim.AdamW(
            self._groups(),
            lr=0.0,
            betas=(0.9, 0.98),
            weight_decay=schedule.weight_decay,
            fused=True,
        )

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds."""
        return {"model": self.model, "probe": self.probe, "text_probe": self.text_probe}

    def _groups(self) -> list[dict[str, object]]:
        """Return parameter groups: seeing and decoding, each with and without weight decay."""
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in nn.ModuleDict(self.modules).named_parameters():
            sees = not name.startswith(("text_probe", "model.model.language_model"))
            groups.setdefault((sees, parameter.ndim > 1), []).append(parameter)
        return [
            {"params": found, "sees": sees} | ({} if decays else {"weight_decay": 0.0})
            for (sees, decays), found in groups.items()
        ]

    def step(self, step: int) -> dict[str, float]:
        """Take one optimiser step and return its figures."""
        schedule = self.schedule
        for group in self.optimiser.param_groups:
            group["lr"] = schedule.rates(step)[0 if group["sees"] else 1]
        self.optimiser.zero_grad(set_to_none=True)
        if step < schedule.vision_steps:
            pixels, targets = self._charts(step, schedule.vision_batch)
            loss, seen = self.probe.loss(image_features(self.model, pixels), targets)
            names = ("place", "colour", "value", "kind")
            figures = dict(zip(names, seen.tolist(), strict=True))
        else:
            first = (step - schedule.vision_steps) * schedule.batch
            batch = self.packer.batch("train", range(first, first + schedule.batch))
            extra = self._charts(step, schedule.probe_batch)
            probes = (self.probe, self.text_probe)
            weights = schedule.probe_weights(step)
            loss, figures = step_loss(self.model, probes, batch, extra, weights)
        loss.backward()
        trained = [p for group in self.optimiser.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, schedule.clip)
        self.optimiser.step()
        return {"loss": loss.item(), **figures}

    def _charts(self, step: int, count: int) -> tuple[Tensor, Tensor]:
        """Return fresh pictures and patch targets for the probe, of another seed than the text."""
        first = step * self.schedule.vision_batch
        seed = self.schedule.seed + 1000
        return seen_by_probe([build_chart("train", first + i, seed) for i in range(count)])


def export_weights(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, path: Path
) -> None:
    """Write the target as a Hugging Face folder, weights in bf16."""
    state = {name: t.detach().to(torch.bfloat16) for name, t in model.state_dict().items()}
    config = model.config
    twin = build_model(config).to(torch.bfloat16)
    twin.load_state_dict(state)
    with atomic_dir(path) as folder:
        twin.save_pretrained(folder)
        build_processor(tokenizer).save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)  # transformers leaves the weights readable by their owner only


def train(
    out: Path,
    schedule: Schedule,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    quiet: bool = False,
) -> Path:
    """Train the target, resuming from ``out`` where a checkpoint is.

    Args:
        out: run folder for the checkpoint and, at the end, the folder ``weights``.
        schedule: lengths and rates.
        tokenizer: vocabulary to use; trained from generated text where None.
        quiet: print no progress line.

    Returns:
        The folder with the finished target.

    Raises:
        UserError: if ``out`` holds a run with another schedule.
    """
    found = read_checkpoint(out, asdict(schedule))
    trainer = Trainer(schedule, tokenizer or build_tokenizer())
    step = 0
    if found is not None:
        step = found.step
        found.restore(trainer.modules, trainer.optimiser)
        say(f"continuing after step {step} of {schedule.total_steps}", quiet)
    line = _ProgressLine(step, schedule.total_steps, quiet)
    saved = time.monotonic()
    while step < schedule.total_steps:
        line.show(step, trainer.step(step))
        step += 1
        at_end = step in (schedule.vision_steps, schedule.total_steps)
        if at_end or time.monotonic() - saved > SAVE_EVERY_S:
            save_checkpoint(out, step, asdict(schedule), trainer.modules, trainer.optimiser)
            saved = time.monotonic()
    export_weights(trainer.model, trainer.tokenizer, out / WEIGHTS)
    return out / WEIGHTS


class _ProgressLine:
    """A line on stderr every 20 seconds: steps, time left, smoothed figures."""

    def __init__(self, first: int, total: int, quiet: bool) -> None:
        self.first, self.total, self.quiet = first, total, quiet
        self.began = self.shown = time.monotonic()
        self.smooth: dict[str, float] = {}

    def show(self, step: int, figures: dict[str, float]) -> None:
        """Smooth the figures of a step and print them if it is time."""
        kept = self.smooth if self.smooth.keys() == figures.keys() else figures
        known = {key: v if math.isfinite(v) else kept[key] for key, v in figures.items()}
        self.smooth = {key: 0.95 * kept[key] + 0.05 * value for key, value in known.items()}
        now = time.monotonic()
        if now - self.shown < 20.0:
            return
        self.shown = now
        seconds_per_step = (now - self.began) / (step + 1 - self.first)
        left_min = (self.total - step - 1) * seconds_per_step / 60
        texts = " ".join(f"{key} {value:.3f}" for key, value in self.smooth.items())
        say(f"step {step + 1}/{self.total}, {left_min:.0f} min left: {texts}", self.quiet)
