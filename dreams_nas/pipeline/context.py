"""What the stages of one run share, loaded once and only when a stage needs it."""

from functools import cache, cached_property
from pathlib import Path

from dreams_nas.core.console import say
from dreams_nas.core.device import (
    Deployment,
    build_deployment,
    default_threads,
    identify_device,
    resolve_device,
)
from dreams_nas.core.files import hash_json
from dreams_nas.core.seeds import derive_seed
from dreams_nas.decode.generation import require_greedy
from dreams_nas.features.conversations import Conversation, load_conversations
from dreams_nas.features.store import FeatureStore, load_features
from dreams_nas.latency.table import LatencyTable, load_table
from dreams_nas.pipeline.config import RunConfig, SeededConfig
from dreams_nas.pipeline.finetune import Splits
from dreams_nas.space.search_space import SearchSpace, load_search_space
from dreams_nas.supernet.checkpoint import SupernetConfig, load_supernet
from dreams_nas.supernet.supernet import Supernet
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.loading import load_placed


class Place:
    """A target on a deployment."""

    def __init__(self, config: SeededConfig, quiet: bool = False) -> None:
        """Resolve device and threads; the target is loaded when it is asked for.

        Raises:
            UserError: No such device.
        """
        self.config = config
        self.quiet = quiet
        self.device = resolve_device(config.device)
        self.threads = config.threads or default_threads()

    @cached_property
    def deployment(self) -> Deployment:
        """Where everything here is measured."""
        config = self.config
        return build_deployment(
            self.device, config.dtype, attention=config.attention, threads=self.threads
        )

    @cached_property
    def target(self) -> HuggingFaceTarget:
        """The loaded target.

        Raises:
            UserError: A broken target, or a generation config that greedy decoding cannot honour.
        """
        say(f"loading target {self.config.target} ({self.deployment.key})", self.quiet)
        target = load_placed(self.config)
        require_greedy(target)
        return target

    def seed(self, stage: str) -> int:
        """Seed of a stage."""
        return derive_seed(self.config.seed, stage)

    def load_table(self, path: Path, allow_mismatch: bool = False) -> LatencyTable:
        """A table of this deployment and target.

        Raises:
            UserError: Missing, broken, or of another deployment or target.
        """
        table = load_table(path)
        table.require_match(
            self.deployment,
            self.target.spec.shape_hash,
            identify_device(self.device),
            allow_mismatch=allow_mismatch,
        )
        return table

    def load_supernet(self, folder: Path) -> tuple[Supernet, SupernetConfig]:
        """A supernet of this target, float32."""
        return load_supernet(folder, self.target)


class RunContext(Place):
    """A run folder and what lies in it."""

    def __init__(self, config: RunConfig, quiet: bool = False) -> None:
        """Check what can be checked without a target.

        Raises:
            UserError: No such device or space, or a data set that is empty or broken.
        """
        super().__init__(config, quiet)
        self.run = config
        self.folder = Path(config.out)
        self.space: SearchSpace = load_search_space(config.space)

    def path(self, name: str) -> Path:
        """An artefact of the run."""
        return self.folder / name

    @cache  # noqa: B019 - one context per run
    def conversations(self, split: str) -> list[Conversation]:
        """Prompts of a split; the same at every call.

        Raises:
            UserError: Nothing there, or an entry that breaks a rule.
        """
        data = self.run.data
        source, count = getattr(data, split), getattr(data, f"num_{split}")
        return load_conversations(source, count, self.seed(f"data-{split}"))

    @cache  # noqa: B019
    def data_hash(self, split: str) -> str:
        """Hash of a split's prompts, images included."""
        return hash_json([c.content_hash() for c in self.conversations(split)])

    def store(self, split: str) -> FeatureStore:
        """Recorded answers of a split."""
        return load_features(self.path(f"features/{split}"))

    @property
    def splits(self) -> Splits:
        """Recorded answers of the three splits."""
        return Splits(self.store("train"), self.store("choose"), self.store("score"))

    @cached_property
    def table(self) -> LatencyTable:
        """The run's latency table."""
        return self.load_table(self.path("table.json"))

    @cached_property
    def supernet(self) -> tuple[Supernet, SupernetConfig]:
        """The run's supernet."""
        return self.load_supernet(self.path("supernet"))
