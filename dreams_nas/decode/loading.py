"""From folders to answers: loads target, draft and table, checks what can be checked before."""

from pathlib import Path
from typing import Any

from dreams_nas.core.config import build_config
from dreams_nas.core.console import warn
from dreams_nas.core.device import Attention, Dtype, identify_device
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import require_writable
from dreams_nas.decode.answer import Answer
from dreams_nas.decode.costs import warn_of_free_decisions
from dreams_nas.decode.decoder import AnswerStream, Decoder, Pictures, Prompt, conversation
from dreams_nas.decode.engine import require_chain
from dreams_nas.decode.policies import Policy, build_policy
from dreams_nas.decode.settings import GenerateConfig, GenerationSettings
from dreams_nas.draft.config import DraftConfig
from dreams_nas.draft.model import DraftModel, load_draft, load_draft_config
from dreams_nas.latency.table import load_table
from dreams_nas.space.policy import PolicyName
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.deployment import target_deployment
from dreams_nas.targets.loading import load_placed
from dreams_nas.targets.protocol import Target


def load_draft_and_tree(
    folder: Path, target: Target, chain: int | None = None
) -> tuple[DraftModel, StaticTree]:
    """Read a draft folder; the tree is the one stored with the draft.

    Args:
        folder: Draft checkpoint.
        target: Whose device and dtype the draft takes.
        chain: Levels of a chain to draft instead.

    Raises:
        UserError: No such draft, another target's, or no tree stored and no chain given.
    """
    draft = load_draft(folder, target.device, target.dtype)
    spec = target.spec
    draft.config.require_target(spec.tokenizer_hash, spec.embedding_hash, spec.name)
    return draft, own_tree(folder, draft.config, chain)


def own_tree(folder: Path, config: DraftConfig, chain: int | None = None) -> StaticTree:
    """The tree stored with a draft, or a chain instead.

    Raises:
        UserError: No tree stored and no chain given.
    """
    if chain is not None:
        return StaticTree.chain(chain)
    if config.policy is None:
        raise UserError(
            f"{folder}: no draft tree was chosen for this draft yet (policy is null in its "
            "config.json); run `dreams-nas finetune`, or give --chain LEVELS"
        )
    return config.policy


def require_draft_folder(name: str, folder: str | Path) -> None:
    """Refuse a missing draft folder before a target is loaded.

    Raises:
        UserError: No draft there.
    """
    for file in ("config.json", "model.safetensors"):
        if not (Path(folder) / file).is_file():
            raise UserError(
                f"draft '{name}': {folder} holds no {file}; a draft folder is what "
                "`dreams-nas finetune` or `dreams-nas export` wrote"
            )


def load_decoder(
    target: str = "embedded",
    draft: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: Dtype = "float32",
    attention: Attention = "sdpa",
    threads: int | None = None,
    chain: int | None = None,
    policy: PolicyName | None = None,
    table: str | Path | None = None,
    allow_mismatch: bool = False,
) -> Decoder:
    """Load a target and a draft to answer many prompts with.

    Args:
        target: `embedded`, a folder in the form of Hugging Face, or a hub id.
        draft: Draft folder; None decodes plainly.
        device: auto, cpu or cuda:N.
        dtype: Precision of both.
        attention: Attention backend of the target.
        threads: CPU threads of one operation; None takes OMP_NUM_THREADS, or all cores.
        chain: Levels of a chain to draft instead of the draft's own tree.
        policy: Policy instead of the draft's own tree.
        table: Latency table of this deployment; `adaptive` decides by it.
        allow_mismatch: Only warn when the table was measured elsewhere.

    Raises:
        UserError: A missing target, draft or table, or one that belongs to another target.
    """
    given = {
        "target": target,
        "draft": None if draft is None else str(draft),
        "device": device,
        "dtype": dtype,
        "attention": attention,
        "threads": threads,
        "chain": chain,
        "policy": policy,
        "table": None if table is None else str(table),
        "allow_mismatch": allow_mismatch,
    }
    return _load(build_config(GenerateConfig, given, "the call"))


def start(config: GenerateConfig) -> AnswerStream:
    """Answer the prompt of a config; prompt, images and draft are looked at before loading.

    Raises:
        UserError: As `load_decoder` and `Decoder.stream`.
    """
    conversation(config.prompt, config.images)
    if config.trace is not None:
        require_writable(config.trace)
    return _load(config).stream(
        config.prompt,
        config.images,
        max_new_tokens=config.max_new_tokens,
        settings=config.settings,
        seed=config.seed,
    )


def _load(config: GenerateConfig) -> Decoder:
    _warn_of_idle(config)
    if config.draft is None:
        return Decoder(load_placed(config))
    require_draft_folder("draft", config.draft)
    folder, name = Path(config.draft), config.policy
    described, table = load_draft_config(folder), None
    if name == "adaptive":
        assert config.table is not None, "the config asks for one"
        table = load_table(config.table)
        warn_of_free_decisions(table)
        kv = table.grid("target_step").kv_range[1] // 2
        policy: Policy = build_policy(name, described, StaticTree(), table, kv)
    else:
        policy = own_tree(folder, described, config.chain)
        if name is not None:
            policy = build_policy(name, described, policy)
    require_chain(config.settings, policy)
    target = load_placed(config)
    if table is not None:
        table.require_match(
            target_deployment(target),
            target.spec.shape_hash,
            identify_device(str(target.device)),
            allow_mismatch=config.allow_mismatch,
        )
    return Decoder(target, load_draft(folder, target.device, target.dtype), policy)


def _warn_of_idle(config: GenerateConfig) -> None:
    """Name what was given and changes nothing."""
    if config.settings.idle:
        warn(f"{', '.join(config.settings.idle)}: not used without --sample")
    flags = {"chain": config.chain, "policy": config.policy, "table": config.table}
    given = {name for name, value in flags.items() if value is not None}
    if config.draft is None:
        if config.settings.draws_drafts:
            given.add("acceptance")
        for name in sorted(given):
            warn(f"--{name} is not used without --draft")
    elif "table" in given and config.policy != "adaptive":
        warn("--table is not used without --policy adaptive")


def generate(
    prompt: Prompt,
    images: Pictures = (),
    *,
    target: str = "embedded",
    draft: str | Path | None = None,
    device: str = "auto",
    dtype: Dtype = "float32",
    chain: int | None = None,
    policy: PolicyName | None = None,
    table: str | Path | None = None,
    attention: Attention = "sdpa",
    threads: int | None = None,
    allow_mismatch: bool = False,
    max_new_tokens: int = 128,
    seed: int = 0,
    **settings: Any,
) -> Answer:
    """Answer one prompt; loads target and draft anew, so keep a `load_decoder` for many.

    Args:
        prompt: A question, or a conversation in the form of Hugging Face.
        images: Pictures or their files.
        target: `embedded`, a folder in the form of Hugging Face, or a hub id.
        draft: Draft folder; None decodes plainly.
        device: auto, cpu or cuda:N.
        dtype: Precision of target and draft.
        chain: Levels of a chain to draft instead of the draft's own tree.
        policy: Policy instead of the draft's own tree.
        table: Latency table of this deployment; `adaptive` decides by it.
        attention: Attention backend of the target.
        threads: CPU threads of one operation; None takes OMP_NUM_THREADS, or all cores.
        allow_mismatch: Only warn when the table was measured elsewhere.
        max_new_tokens: Most tokens of the answer.
        seed: Of the random numbers that sampling draws.
        settings: Fields of `GenerationSettings` by name: `do_sample`, `temperature`, `top_p`...

    Raises:
        UserError: Bad input or settings.
    """
    if isinstance(stop := settings.get("stop_strings"), str):
        settings["stop_strings"] = (stop,)
    chosen = build_config(GenerationSettings, settings, "the call")
    if chosen.idle:
        warn(f"{', '.join(chosen.idle)}: not used without do_sample=True")
    conversation(prompt, images)
    decoder = load_decoder(
        target,
        draft,
        device=device,
        dtype=dtype,
        attention=attention,
        threads=threads,
        chain=chain,
        policy=policy,
        table=table,
        allow_mismatch=allow_mismatch,
    )
    return decoder.generate(
        prompt, images, max_new_tokens=max_new_tokens, settings=chosen, seed=seed
    )
