"""Training a supernet: two-phase progressive training (TPPT, DREAM-S, arXiv 2606.00535).

Phase 1 trains the full draft. Then groups and channels are put in order of importance, so that a
narrow subnet is a prefix. Phase 2 trains subnets by the sandwich rule. All losses are on the target
itself; in-place distillation from the largest draft is absent, since its teacher is at hand.

Taps have column blocks of their own in `fc`, and a block that phase 1 never reads would enter phase
2 untrained; so phase 1 gives every other step to the other taps of the space.

Measured on 120 CPU seconds, 320 answers of a half-trained embedded target, space `demo`, acceptance
length of a chain of 4 on 60 other answers, for the largest body / depth 1 at full width / the
smallest:

    2 random subnets per step              3.44 / 3.22 / 2.90
    1                                      3.50 / 3.29 / 3.00
    0                                      3.56 / 3.21 / 3.21
    1, phase 1 a fifth of the budget       3.41 / 3.31 / 3.10

Without random subnets the ends gain and what lies between falls behind, so that a search would rank
wrongly. Drawing the vocabulary of both ends too instead of training them on the whole one changed
nothing: the loss over the whole vocabulary trains all its prefixes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dreams_nas.core.files import write_json
from dreams_nas.core.seeds import derive_seed
from dreams_nas.distill.checkpoint import remove_checkpoint, write_log
from dreams_nas.distill.drafting_task import AnswerData
from dreams_nas.distill.recipes import SupernetTrainingConfig
from dreams_nas.distill.sampling import Recordings, SubnetSampler
from dreams_nas.distill.trainer import StepLoss, TrainReport, train
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.supernet.checkpoint import build_supernet, save_supernet, supernet_config
from dreams_nas.supernet.importance import apply_order, measure_importance
from dreams_nas.supernet.supernet import Supernet
from dreams_nas.targets.protocol import Target


class SupernetTask:
    """Losses of a supernet's subnets."""

    def __init__(
        self,
        supernet: Supernet,
        space: SearchSpace,
        data: AnswerData,
        config: SupernetTrainingConfig,
        seed: int,
    ) -> None:
        """Train the subnets of `space` inside `supernet`."""
        self.module: nn.Module = supernet
        self._supernet, self._space, self._data, self._config = supernet, space, data, config
        self._sampler = SubnetSampler(space, config.num_random, seed)
        self._full = space.largest().replace(
            head_ratio=1.0, ffn_ratio=1.0, depth=len(supernet.body.layers)
        )
        self.is_ordered = False

    def before_step(
        self,
        step: int,
        progress: float,
        optimizer: torch.optim.Optimizer,
        averages: dict[str, Tensor],
    ) -> None:
        """Between the phases, once: put widths in order of importance."""
        if self.is_ordered or progress < self._config.full_share:
            return
        losses = (
            self._loss(index, self._full).total
            for index in range(self._config.num_calibration_batches)
        )
        scores = measure_importance(self._supernet, losses)
        apply_order(self._supernet, [score.order() for score in scores], optimizer, averages)
        self.is_ordered = True

    def _loss(self, batch_index: int, arch: DraftArch) -> Any:
        step = self._data.batch(batch_index)
        layer_ids = arch.sizes(self._supernet.dims).target_layer_ids
        return step.loss(self._supernet.weights(arch), layer_ids, arch.keep_ratio)

    def subnets(self, step: int, progress: float) -> list[DraftArch]:
        """What a step trains."""
        share = self._config.full_share
        if progress >= share:
            return self._sampler.choose(step, (progress - share) / max(1 - share, 1e-9))
        taps = [tap for tap in self._space.tap if tap != self._full.tap]
        if step % 2 == 0 or not taps:
            return [self._full]
        return [self._full.replace(tap=taps[step // 2 % len(taps)])]

    def num_losses(self, step: int, progress: float) -> int:
        """Subnets of a step."""
        return len(self.subnets(step, progress))

    def losses(
        self, step: int, batch_index: int, progress: float, want_metrics: bool
    ) -> Iterator[StepLoss]:
        """One loss per subnet; the log shows the first and the second."""
        answers = self._data.batch(batch_index)
        for place, arch in enumerate(self.subnets(step, progress)):
            layer_ids = arch.sizes(self._supernet.dims).target_layer_ids
            loss = answers.loss(self._supernet.weights(arch), layer_ids, arch.keep_ratio)
            metrics = {}
            if want_metrics and place < 2:
                metrics = answers.metrics("" if place == 0 else "smallest_", loss)
            yield StepLoss(loss.total, metrics)

    def state(self) -> dict[str, Any]:
        """Whether the widths are in order."""
        return {"is_ordered": self.is_ordered}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self.is_ordered = bool(state["is_ordered"])


def train_supernet(
    space: SearchSpace,
    recordings: Recordings,
    target: Target,
    vocab_order_V: Tensor,
    config: SupernetTrainingConfig,
    *,
    seed: int = 0,
    folder: Path | None = None,
    data_hash: str | None = None,
    quiet: bool = False,
) -> tuple[Supernet, TrainReport]:
    """Train a supernet that holds every draft of a space.

    Args:
        space: Its largest draft sets depth and taps.
        recordings: The target's own answers, with features of all taps of the space.
        target: For its embedding and head.
        vocab_order_V: All token ids, the most frequent in the answers first.
        config: Recipe and phases.
        seed: Of weights, order of answers and choice of subnets.
        folder: Where the supernet, its log and its checkpoints go; an unfinished run found there is
            continued.
        data_hash: Identifies the recordings in a checkpoint.
        quiet: No progress bar.

    Returns:
        The trained supernet, and what training did.

    Raises:
        UserError: A tap that the target does not have, no answers to train on, or a checkpoint of
            another training.
    """
    space.validate_for(target.spec.dims)
    described = supernet_config(target, space.tap_layers(target.spec.dims), max(space.depth))
    supernet = build_supernet(described, target, vocab_order_V, derive_seed(seed, "weights"))
    num_vocab = space.largest().sizes(target.spec.dims).vocab
    data = AnswerData(
        recordings,
        target,
        supernet.vocab_order_V[:num_vocab],
        config.recipe,
        derive_seed(seed, "answers"),
    )
    task = SupernetTask(supernet, space, data, config, derive_seed(seed, "subnets"))
    fingerprint = {
        "seed": seed,
        "space": space.hash,
        "data": data_hash,
        "num_answers": len(recordings),
        "full_share": config.full_share,
        "num_random": config.num_random,
        "num_calibration_batches": config.num_calibration_batches,
    }
    report = train(
        task,
        config.recipe,
        folder=folder,
        fingerprint=fingerprint,
        description="supernet",
        quiet=quiet,
    )
    if folder is not None:
        save_supernet(folder, supernet, described)
        write_json(folder / "training.json", _summary(config, report, seed))
        write_log(folder, report.log)
        remove_checkpoint(folder)
    return supernet, report


def _summary(config: SupernetTrainingConfig, report: TrainReport, seed: int) -> dict[str, Any]:
    return {
        "config": config.model_dump(mode="json"),
        "seed": seed,
        "num_steps": report.num_steps,
        "seconds": round(report.seconds, 3),
    }
