"""The one training loop: supernets and single drafts differ only in the task they give it.

A step asks the task for one loss after the other, adds up their gradients and moves the weights.
Everything random in a step follows from its number and the seed (`sampling.py`), so a checkpoint
needs no generator state: a run of a step budget that is killed and resumed ends with the weights of
an uninterrupted one. With a time budget the share of time used takes the place of the share of
steps, in the learning rate and in the task.

In a distributed run every process trains the same subnets on its own batches and the gradients are
averaged, parameters that a step did not use counting as zero.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dreams_nas.core.console import progress as show_progress
from dreams_nas.core.errors import RunError, UserError
from dreams_nas.distill.checkpoint import TrainState, load_checkpoint, save_checkpoint
from dreams_nas.distill.recipes import Recipe

_LOG_EVERY = 10
"""Steps per line of the log."""

_CHECKPOINT_SECONDS = 45.0


class StepLoss(NamedTuple):
    """One loss of a step, ready for its backward pass."""

    total: Tensor
    """Scalar; the gradients of a step's losses are averaged."""
    metrics: Mapping[str, float]
    """What the log shows of it; empty for most."""


class Task(Protocol):
    """What is trained, and on what."""

    @property
    def module(self) -> nn.Module:
        """Its parameters are trained."""

    def before_step(
        self,
        step: int,
        progress: float,
        optimizer: torch.optim.Optimizer,
        averages: dict[str, Tensor],
    ) -> None:
        """Change the module between two steps, moments and averages along with it."""

    def losses(
        self, step: int, batch_index: int, progress: float, want_metrics: bool
    ) -> Iterator[StepLoss]:
        """Losses of a step, built one at a time.

        Args:
            step: Counted from 0.
            batch_index: Which batch; differs between processes.
            progress: Share of the budget used, [0, 1).
            want_metrics: Whether this step is logged.
        """

    def num_losses(self, step: int, progress: float) -> int:
        """How many there will be."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember besides tensors, as JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""


@dataclass(frozen=True)
class TrainReport:
    """What a training did."""

    num_steps: int
    seconds: float
    log: list[dict[str, Any]]
    """Lines of the log."""


def learning_rate(recipe: Recipe, progress: float) -> float:
    """Learning rate at a share of the budget, [0, 1]."""
    if progress < recipe.warmup:
        return recipe.lr * progress / recipe.warmup
    if recipe.schedule == "constant":
        return recipe.lr
    done = (progress - recipe.warmup) / (1 - recipe.warmup)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def build_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas)


def train(
    task: Task,
    recipe: Recipe,
    *,
    folder: Path | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    trackers: Sequence[str] = (),
    description: str = "training",
    quiet: bool = False,
    checkpoint_seconds: float = _CHECKPOINT_SECONDS,
) -> TrainReport:
    """Train until the budget is used up.

    Args:
        task: What is trained.
        recipe: Optimiser and budget.
        folder: Where checkpoints and `training_log.jsonl` go; an unfinished run found there is
            continued. None keeps nothing.
        fingerprint: What a resumed run must have in common with the first one, as JSON.
        trackers: Names of accelerate's trackers, e.g. "tensorboard".
        description: For the progress bar.
        quiet: No progress bar.
        checkpoint_seconds: Time between checkpoints.

    Raises:
        UserError: No budget, a tracker that is not installed, or a checkpoint of another run.
        RunError: The loss is not finite.
    """
    if recipe.max_seconds is None and recipe.num_steps is None:
        raise UserError("training needs a budget: set max_seconds, num_steps or both")
    loop = _Loop(task, recipe, folder, fingerprint or {}, trackers, checkpoint_seconds)
    return loop.run(description, quiet)


class _Loop:
    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        folder: Path | None,
        fingerprint: Mapping[str, Any],
        trackers: Sequence[str],
        checkpoint_seconds: float,
    ) -> None:
        self._task, self._recipe, self._folder = task, recipe, folder
        self._parameters = {n: p for n, p in task.module.named_parameters() if p.requires_grad}
        device = next(iter(self._parameters.values())).device
        self._accelerator = _build_accelerator(device, trackers, folder)
        self._optimizer = build_optimizer(task.module, recipe)
        self._averages: dict[str, Tensor] = {}
        if recipe.average_decay:
            self._averages = {n: p.detach().clone() for n, p in self._parameters.items()}
        budget = recipe.model_dump(mode="json")
        self._state = TrainState(fingerprint={**fingerprint, "recipe": budget})
        self._checkpoint_seconds = checkpoint_seconds
        if folder is not None:
            self._resume(folder)

    def _resume(self, folder: Path) -> None:
        found = load_checkpoint(
            folder, self._state, self._parameters, self._optimizer, self._averages
        )
        if found is not None:
            self._state = found
            self._task.load_state(found.task)

    def _progress(self) -> float:
        """Share of the budget used; the same on every process."""
        recipe, state = self._recipe, self._state
        share = state.step / recipe.num_steps if recipe.num_steps else 0.0
        if recipe.max_seconds:
            share = max(share, state.seconds / recipe.max_seconds)
        if self._accelerator.num_processes > 1:
            value = torch.tensor([share if self._accelerator.is_main_process else 0.0])
            share = float(self._accelerator.reduce(value.to(self._accelerator.device), "sum"))
        return share

    def run(self, description: str, quiet: bool) -> TrainReport:
        state, started = self._state, time.perf_counter()
        before = state.seconds
        last_saved = started
        quiet = quiet or not self._accelerator.is_main_process
        with show_progress(description, 1.0, quiet) as bar:
            shown = 0.0
            while (progress := self._progress()) < 1:
                line = self._step(progress)
                state.step += 1
                now = time.perf_counter()
                state.seconds = before + now - started
                bar.advance(progress - shown)
                shown = progress
                if line is not None:
                    state.log.append(
                        {"step": state.step, "seconds": round(state.seconds, 3), **line}
                    )
                    self._accelerator.log(line, step=state.step)
                    bar.describe(_describe(description, line))
                if now - last_saved > self._checkpoint_seconds:
                    self._save()
                    last_saved = time.perf_counter()
        with torch.no_grad():
            for name, average in self._averages.items():
                self._parameters[name].copy_(average)
        self._accelerator.end_training()
        return TrainReport(state.step, state.seconds, state.log)

    def _save(self) -> None:
        if self._folder is None or not self._accelerator.is_main_process:
            return
        self._state.task = self._task.state()
        save_checkpoint(
            self._folder, self._state, self._parameters, self._optimizer, self._averages
        )

    def _step(self, progress: float) -> dict[str, float] | None:
        """One optimiser step; returns what the log shows of it."""
        step, task, accelerator = self._state.step, self._task, self._accelerator
        want_log = step % _LOG_EVERY == 0
        task.before_step(step, progress, self._optimizer, self._averages)
        lr = learning_rate(self._recipe, progress)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        batch_index = step * accelerator.num_processes + accelerator.process_index
        share = 1 / task.num_losses(step, progress)
        metrics: dict[str, float] = {}
        total = 0.0
        with self._precision():
            for loss in task.losses(step, batch_index, progress, want_log):
                with torch.autocast(accelerator.device.type, enabled=False):
                    accelerator.backward(loss.total * share)
                if want_log:
                    total += share * float(loss.total.detach())
                    metrics |= loss.metrics
        self._reduce_gradients()
        # A loss that is not finite has a gradient that is not: the norm tells of both.
        norm = accelerator.clip_grad_norm_(self._parameters.values(), self._recipe.grad_clip)
        if not math.isfinite(float(norm)):
            raise RunError(
                f"the gradient's norm is {float(norm)} at step {step}; train with a lower lr, or "
                "with dtype float32"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name].detach(), 1 - self._recipe.average_decay)
        return {"loss": total, "lr": lr, "grad_norm": float(norm), **metrics} if want_log else None

    def _precision(self) -> AbstractContextManager[Any]:
        if self._recipe.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._accelerator.device.type, torch.bfloat16)

    def _reduce_gradients(self) -> None:
        if self._accelerator.num_processes == 1:
            return
        for parameter in self._parameters.values():
            if parameter.grad is None:  # every process must take part in every reduction
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self._accelerator.reduce(parameter.grad, "mean")


def _build_accelerator(
    device: torch.device, trackers: Sequence[str], folder: Path | None
) -> Accelerator:
    try:
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            log_with=list(trackers) or None,
            project_dir=None if folder is None else str(folder),
        )
        if trackers:
            accelerator.init_trackers("dreams-nas")
    except (ValueError, ImportError) as error:
        raise UserError(f"trackers {list(trackers)}: {error}") from error
    assert accelerator.device.type == device.type, f"weights on {device}, {accelerator.device} used"
    return accelerator


def _describe(description: str, line: Mapping[str, float]) -> str:
    tau = line.get("acceptance_estimate")
    text = f"{description}  loss {line['loss']:.3f}"
    return text if tau is None else f"{text}  tau~{tau:.2f}"
