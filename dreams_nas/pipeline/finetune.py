"""The stage `finetune`: one draft alone, replayed with its own weights, its tree chosen again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dreams_nas.core.config import build_config
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json, write_json
from dreams_nas.distill.finetune import train_draft
from dreams_nas.distill.recipes import Recipe
from dreams_nas.draft.model import DraftModel
from dreams_nas.features.store import FeatureStore
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.table import LatencyTable
from dreams_nas.pipeline.replayed import as_deployed, replay_draft, replayable
from dreams_nas.search.objective import Evaluation, score_tree
from dreams_nas.search.trees import best_tree_of_size, choose_tree
from dreams_nas.space.search_space import PolicySpace
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import Target

EVALUATION_FILE = "evaluation.json"
PUBLISHED_TREE_FILE = "published_tree.json"


@dataclass(frozen=True)
class Splits:
    """Recorded answers of the three splits that are collected."""

    train: FeatureStore
    choose: FeatureStore
    score: FeatureStore


def finetune(
    draft: DraftModel,
    target: Target,
    splits: Splits,
    table: LatencyTable,
    policy: PolicySpace,
    recipe: Recipe,
    *,
    folder: Path,
    seed: int,
    published_size: tuple[int, int] | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Train a draft alone, replay it and choose its tree; write all that to a folder.

    The prediction made here, with the draft's own weights, is the one that reports hold against
    the measurement.

    Args:
        draft: Extracted from the supernet, or fresh; float32. Trained in place.
        target: Its target.
        splits: Answers to train on, to choose the tree on, and to score it on.
        table: Latencies of this deployment.
        policy: Policies to choose from.
        recipe: Losses and budget.
        folder: Gets the checkpoint, with its policy, and `evaluation.json`.
        seed: Of the order of answers.
        published_size: Levels and nodes; the best static tree of that size goes to
            `published_tree.json`.
        quiet: No progress.
    """
    train_draft(
        draft,
        replayable(splits.train),
        target,
        recipe,
        seed=seed,
        folder=folder,
        data_hash=splits.train.manifest.key_hash,
        description=f"training {draft.config.arch.key}",
        quiet=quiet,
    )
    num_levels = max(policy.levels[1], published_size[0] if published_size else 0)
    # Replayed as it will decode, saved as it was trained.
    deployed = as_deployed(draft, target.dtype)
    paths = replay_draft(deployed, target, (splits.choose, splits.score), num_levels)
    arch, dims = draft.config.arch, target.spec.dims
    costs = CostModel(table, arch, dims)
    tree = choose_tree(paths.choose, costs, policy).tree
    evaluation = score_tree(costs, arch, tree, paths.score, dims)
    if published_size is not None:
        published = best_tree_of_size(paths.choose, *published_size)
        write_json(folder / PUBLISHED_TREE_FILE, published.model_dump(mode="json"))
    draft.config = draft.config.replace(policy=tree)
    write_json(folder / EVALUATION_FILE, evaluation.model_dump(mode="json"))
    draft.save(folder)
    return evaluation


def load_evaluation(folder: Path) -> Evaluation:
    """What `finetune` predicted of the draft in a folder."""
    path = folder / EVALUATION_FILE
    return build_config(Evaluation, read_json(path), str(path))


def load_published_tree(folder: Path) -> StaticTree:
    """The best static tree of the published size."""
    path = folder / PUBLISHED_TREE_FILE
    return build_config(StaticTree, read_json(path), str(path))


def require_layers(stores: Sequence[FeatureStore], layer_ids: Sequence[int]) -> None:
    """Refuse stores that lack a tapped layer, before anything is trained.

    Raises:
        UserError: Names the store, the layers it has and those that are needed.
    """
    for store in stores:
        recorded = store.manifest.target_layer_ids
        if missing := sorted(set(layer_ids) - set(recorded)):
            raise UserError(
                f"{store.folder}: records target layers {list(recorded)}, and layers {missing} "
                "are needed too; collect again with their taps"
            )
