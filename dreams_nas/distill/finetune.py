"""Training one draft alone: from the supernet's weights, or from scratch by its own recipe."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from dreams_nas.core.files import hash_bytes, hash_json, write_json
from dreams_nas.core.seeds import derive_seed
from dreams_nas.distill.checkpoint import remove_checkpoint, write_log
from dreams_nas.distill.drafting_task import AnswerData
from dreams_nas.distill.recipes import Recipe
from dreams_nas.distill.sampling import Recordings
from dreams_nas.distill.trainer import StepLoss, TrainReport, train
from dreams_nas.draft.model import DraftModel
from dreams_nas.space.arch import DraftArch
from dreams_nas.supernet.checkpoint import supernet_config
from dreams_nas.targets.protocol import Target


class DraftTask:
    """Loss of one draft."""

    def __init__(self, draft: DraftModel, data: AnswerData, target: Target) -> None:
        """Train `draft` on `data`."""
        self.module: nn.Module = draft
        self._draft, self._data = draft, data
        self._layer_ids = draft.config.sizes.target_layer_ids
        # Gathered once: `weights` would gather the head's rows at every step.
        self._head_WD = target.head_weight_VD.float()[draft.vocab_ids_W]

    def before_step(
        self,
        step: int,
        progress: float,
        optimizer: torch.optim.Optimizer,
        averages: dict[str, Tensor],
    ) -> None:
        """A single draft never changes shape."""

    def num_losses(self, step: int, progress: float) -> int:
        """One."""
        return 1

    def losses(
        self, step: int, batch_index: int, progress: float, want_metrics: bool
    ) -> Iterator[StepLoss]:
        """The draft's loss on the step's answers."""
        answers = self._data.batch(batch_index)
        weights = self._draft.body.weights(self._head_WD)
        loss = answers.loss(weights, self._layer_ids, self._draft.config.arch.keep_ratio)
        yield StepLoss(loss.total, answers.metrics("", loss) if want_metrics else {})

    def state(self) -> dict[str, Any]:
        """Nothing besides the weights."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""


def build_draft(arch: DraftArch, target: Target, vocab_order_V: Tensor, seed: int) -> DraftModel:
    """A draft with fresh float32 weights.

    Args:
        arch: Its architecture.
        target: Whose draft it will be.
        vocab_order_V: Token ids, the most frequent first; the draft keeps a prefix.
        seed: Of the weights.
    """
    sizes = arch.sizes(target.spec.dims)
    config = supernet_config(target, sizes.target_layer_ids, arch.depth).draft_config(arch)
    draft = DraftModel(config, target.inv_freq, vocab_order_V[: sizes.vocab])
    draft.body.initialise(torch.Generator().manual_seed(seed))
    return draft.to(target.device)


def train_draft(
    draft: DraftModel,
    recordings: Recordings,
    target: Target,
    recipe: Recipe,
    *,
    seed: int = 0,
    folder: Path | None = None,
    data_hash: str | None = None,
    description: str = "draft",
    quiet: bool = False,
) -> TrainReport:
    """Train a draft alone, in place.

    Args:
        draft: `supernet.extract(config)` to fine-tune, `build_draft(...)` to start from scratch;
            float32.
        recordings: The target's own answers, with features of the draft's taps.
        target: For its embedding and head.
        recipe: Losses, optimiser and budget.
        seed: Of the order of answers.
        folder: Where the draft, its log and its checkpoints go; an unfinished run found there is
            continued.
        data_hash: Identifies the recordings in a checkpoint.
        description: For the progress bar.
        quiet: No progress bar.

    Raises:
        UserError: The draft belongs to another target, no answers to train on, or a checkpoint of
            another training.
    """
    config, spec = draft.config, target.spec
    config.require_target(spec.tokenizer_hash, spec.embedding_hash, spec.name)
    data = AnswerData(recordings, target, draft.vocab_ids_W, recipe, derive_seed(seed, "answers"))
    report = train(
        DraftTask(draft, data, target),
        recipe,
        folder=folder,
        fingerprint={
            "seed": seed,
            "draft": hash_json(config),
            "start": hash_bytes(save(draft.to_tensors())),
            "data": data_hash,
            "num_answers": len(recordings),
        },
        description=description,
        quiet=quiet,
    )
    if folder is not None:
        draft.save(folder)
        summary = {
            "recipe": recipe.model_dump(mode="json"),
            "seed": seed,
            "num_steps": report.num_steps,
            "seconds": round(report.seconds, 3),
        }
        write_json(folder / "training.json", summary)
        write_log(folder, report.log)
        remove_checkpoint(folder)
    return report
