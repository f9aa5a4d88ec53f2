"""Rank paths of subnets on two splits, one unrolled pass per draft body."""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch

from dreams_nas.draft.config import DraftConfig
from dreams_nas.draft.model import DraftModel
from dreams_nas.features.recording import Recording
from dreams_nas.features.store import FeatureStore
from dreams_nas.replay.batched import record_rank_paths
from dreams_nas.search.objective import SplitRankPaths
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.supernet.supernet import Supernet
from dreams_nas.targets.protocol import Target

ModuleT = TypeVar("ModuleT", Supernet, DraftModel)


def as_deployed(module: ModuleT, dtype: torch.dtype) -> ModuleT:
    """The module in the precision it decodes in; a copy where that is not the trained one."""
    is_same = module.body.fc.dtype == dtype
    return module if is_same else copy.deepcopy(module).to(dtype)


def replayable(store: FeatureStore) -> list[Recording]:
    """Recordings with something to decode after the token from prefill."""
    return [recording for recording in store if recording.num_answer_tokens > 1]


class SupernetReplay:
    """Replays subnets; drafts that differ in vocabulary alone share one pass."""

    def __init__(
        self,
        supernet: Supernet,
        target: Target,
        space: SearchSpace,
        choose: FeatureStore,
        score: FeatureStore,
    ) -> None:
        """Read both splits into memory: every body of the space walks all of them.

        Args:
            supernet: Trained.
            target: Its target, for the embedding.
            space: Its vocabulary sizes and levels.
            choose: Answers that trees are chosen on.
            score: Answers that they are scored on.
        """
        self._supernet = supernet
        self._target = target
        self._num_levels = space.policy.levels[1]
        self._vocabs = sorted(space.vocab)
        self._splits: tuple[Sequence[Recording], ...] = (replayable(choose), replayable(score))
        self._body_key = ""
        self._paths: dict[int, SplitRankPaths] = {}

    def __call__(self, arch: DraftArch) -> SplitRankPaths:
        """Rank paths of one subnet on both splits."""
        dims = self._supernet.dims
        if arch.body_key != self._body_key:
            shares = sorted({*self._vocabs, arch.vocab})
            sizes = [arch.replace(vocab=share).sizes(dims).vocab for share in shares]
            weights = self._supernet.weights(arch.replace(vocab=shares[-1]))
            found = [
                record_rank_paths(
                    weights,
                    recordings,
                    self._target.embed,
                    target_layer_ids=arch.sizes(dims).target_layer_ids,
                    keep_ratio=arch.keep_ratio,
                    vocab_order=self._supernet.vocab_order_V[: sizes[-1]],
                    num_vocabs=sizes,
                    num_levels=self._num_levels,
                )
                for recordings in self._splits
            ]
            self._paths = {size: SplitRankPaths(found[0][size], found[1][size]) for size in sizes}
            self._body_key = arch.body_key
        return self._paths[arch.sizes(dims).vocab]


def replay_draft(
    draft: DraftModel, target: Target, splits: Sequence[FeatureStore], num_levels: int
) -> SplitRankPaths:
    """Rank paths of one draft with its own weights, on the *choose* and the *score* split."""
    config: DraftConfig = draft.config
    weights = draft.weights(target.head_weight_VD)
    choose, score = (
        record_rank_paths(
            weights,
            replayable(store),
            target.embed,
            target_layer_ids=config.sizes.target_layer_ids,
            keep_ratio=config.arch.keep_ratio,
            vocab_order=draft.vocab_ids_W,
            num_vocabs=[config.sizes.vocab],
            num_levels=num_levels,
        )[config.sizes.vocab]
        for store in splits
    )
    return SplitRankPaths(choose, score)
