"""One stage alone: `train`, `search` and `finetune` on artefacts named by the user."""

from collections.abc import Sequence
from pathlib import Path

from dreams_nas.core.errors import UserError, unknown_error
from dreams_nas.core.files import file_hash
from dreams_nas.core.lock import machine_lock
from dreams_nas.distill.finetune import build_draft
from dreams_nas.distill.supernet_training import train_supernet
from dreams_nas.distill.trainer import TrainReport
from dreams_nas.features.conversations import load_conversations
from dreams_nas.features.store import load_features
from dreams_nas.features.vocabulary import vocabulary_order
from dreams_nas.pipeline.config import FinetuneConfig, SearchVerbConfig, TrainConfig
from dreams_nas.pipeline.context import Place
from dreams_nas.pipeline.finetune import Splits, finetune, require_layers
from dreams_nas.pipeline.replayed import as_deployed
from dreams_nas.pipeline.run_folder import remove_artefact
from dreams_nas.pipeline.search import search
from dreams_nas.search.objective import Evaluation
from dreams_nas.search.result import SearchResult, load_point
from dreams_nas.space.arch import NAMED_ARCHS, DraftArch
from dreams_nas.space.search_space import load_search_space
from dreams_nas.targets.loading import check_target


def train_verb(config: TrainConfig, *, quiet: bool = False, force: bool = False) -> TrainReport:
    """Train a supernet.

    Raises:
        UserError: A wrong space or store, or features of another target or of too few layers.
    """
    space = load_search_space(config.space)
    store = load_features(config.features)
    check_target(config.target)
    if force:
        start_over(Path(config.out), ("config.json", "checkpoint"))
    place = Place(config, quiet)
    store.require_target(place.target.spec)
    spec = place.target.spec
    require_layers([store], space.tap_layers(spec.dims))
    _, report = train_supernet(
        space,
        store,
        place.target,
        vocabulary_order(store, spec.dims.vocab, spec.eos_token_ids),
        config.train,
        seed=place.seed("train"),
        folder=Path(config.out),
        data_hash=store.manifest.key_hash,
        quiet=quiet,
    )
    return report


def search_verb(
    config: SearchVerbConfig, *, quiet: bool = False, force: bool = False
) -> SearchResult:
    """Search a trained supernet.

    Raises:
        UserError: A wrong space, store, supernet or table, or one of another target or deployment.
    """
    space = load_search_space(config.space)
    choose, score = load_features(config.choose), load_features(config.score)
    check_target(config.target)
    if force:
        start_over(Path(config.out), ("study.json", "result.json"))
    place = Place(config, quiet)
    conversations = load_conversations(
        config.data, config.search.num_prompts, place.seed("data-score")
    )
    for store in (choose, score):
        store.require_target(place.target.spec)
    table = place.load_table(Path(config.table), config.allow_mismatch)
    require_layers([choose, score], space.tap_layers(place.target.spec.dims))
    supernet, described = place.load_supernet(Path(config.supernet))
    return search(
        place.target,
        as_deployed(supernet, place.target.dtype),
        described,
        table,
        space,
        config.search,
        choose=choose,
        score=score,
        conversations=conversations,
        max_new_tokens=config.max_new_tokens,
        supernet_hash=file_hash(Path(config.supernet) / "model.safetensors"),
        out=Path(config.out),
        seed=config.seed,
        quiet=quiet,
    )


def start_over(out: Path, marks: Sequence[str]) -> None:
    """Delete an output folder for `--force`, if it is one.

    Args:
        out: The folder.
        marks: Names of which such a folder holds at least one.

    Raises:
        UserError: It holds something else.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not any((out / mark).exists() for mark in marks):
        raise UserError(
            f"{out}: holds none of {', '.join(marks)}, so --force will not delete it; choose an "
            "empty or a new folder"
        )
    remove_artefact(out)


def load_arch(name_or_path: str) -> DraftArch:
    """A named architecture, or the one in a search's `arch.yaml`.

    Raises:
        UserError: Neither a name nor a file, or a broken file.
    """
    if name_or_path in NAMED_ARCHS:
        return NAMED_ARCHS[name_or_path]
    if not Path(name_or_path).is_file():
        raise unknown_error("architecture (a name or a file)", name_or_path, NAMED_ARCHS)
    return load_point(Path(name_or_path)).arch


def finetune_verb(
    config: FinetuneConfig, *, quiet: bool = False, force: bool = False
) -> Evaluation:
    """Train one draft alone and choose its tree.

    Raises:
        UserError: A wrong architecture, space, store, supernet or table, or one of another target
            or deployment.
    """
    arch = load_arch(config.arch)
    space = load_search_space(config.space)
    splits = Splits(
        load_features(config.train), load_features(config.choose), load_features(config.score)
    )
    check_target(config.target)
    if force:
        start_over(Path(config.out), ("config.json", "checkpoint"))
    place = Place(config, quiet)
    for store in (splits.train, splits.choose, splits.score):
        store.require_target(place.target.spec)
    table = place.load_table(Path(config.table), config.allow_mismatch)
    supernet, described = place.load_supernet(Path(config.supernet))
    layer_ids = arch.sizes(place.target.spec.dims).target_layer_ids
    require_layers([splits.train, splits.choose, splits.score], layer_ids)
    seed = place.seed("finetune")
    if config.from_scratch:
        draft = build_draft(arch, place.target, supernet.vocab_order_V, seed)
    else:
        draft = supernet.extract(described.draft_config(arch))
    with machine_lock("finetune", quiet=quiet):
        return finetune(
            draft,
            place.target,
            splits,
            table,
            space.policy,
            config.recipe,
            folder=Path(config.out),
            seed=seed,
            quiet=quiet,
        )
