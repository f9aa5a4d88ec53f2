"""The verb `bench`: load target, drafts, prompts and table; run the bench; write its folder."""

import time
from pathlib import Path
from statistics import median

from dreams_nas.bench.arms import PLAIN, WINNER_NAME, Arm, load_arm, require_draft_folders
from dreams_nas.bench.artefacts import BENCH_FILES
from dreams_nas.bench.config import BenchConfig
from dreams_nas.bench.policies import policy_arms
from dreams_nas.bench.stage import BenchReport, bench_arms, build_prompts
from dreams_nas.bench.summary import save_bench
from dreams_nas.core.console import warn
from dreams_nas.core.device import identify_device
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import require_own_folder, require_writable
from dreams_nas.core.provenance import provenance
from dreams_nas.core.seeds import derive_seed
from dreams_nas.decode.costs import warn_of_free_decisions
from dreams_nas.decode.generation import require_greedy
from dreams_nas.decode.loading import own_tree
from dreams_nas.decode.policies import build_policy
from dreams_nas.draft.model import load_draft_config
from dreams_nas.features.conversations import load_conversations
from dreams_nas.latency.table import LatencyTable, load_table
from dreams_nas.targets.deployment import target_deployment
from dreams_nas.targets.loading import load_placed


def bench(config: BenchConfig, quiet: bool = False, force: bool = False) -> BenchReport:
    """Compare drafts with plain decoding on one target.

    What can be checked without the target is checked before it is loaded.

    Args:
        config: What to compare, on what, where.
        quiet: No progress.
        force: Replace an earlier bench in the same place.

    Raises:
        UserError: A missing or foreign draft, target, table or data set, no prompts, prompts that
            do not fit, or an earlier bench in the way.
    """
    if not config.drafts:
        raise UserError(
            "there is no draft to compare with plain decoding; give --draft DIR, or NAME=DIR for "
            "several"
        )
    require_draft_folders(config.drafts)
    if config.out is not None:
        require_own_folder(Path(config.out), BENCH_FILES)
        require_writable(Path(config.out) / BENCH_FILES[0])
        if not force and (Path(config.out) / BENCH_FILES[0]).exists():
            raise UserError(
                f"{config.out}: a bench is there already; pass --force to replace it, or another "
                "--out"
            )
    table = None if config.table is None else load_table(config.table)
    _require_policies(config, table)
    seed = derive_seed(config.seed, "data-test")  # as a run does
    conversations = load_conversations(config.data, config.num_prompts, seed)
    if len(conversations) < config.num_prompts:
        warn(f"{config.data} has {len(conversations)} prompts; {config.num_prompts} were asked for")
    start = time.perf_counter()
    target = load_placed(config)
    require_greedy(target)
    deployment = target_deployment(target)
    if table is not None:
        table.require_match(
            deployment,
            target.spec.shape_hash,
            identify_device(str(target.device)),
            allow_mismatch=config.allow_mismatch,
        )
    prompts = build_prompts(target, conversations)
    arms = [PLAIN]
    for name, folder in config.drafts.items():
        arms.append(load_arm(name, Path(folder), target, config.chain))
    if config.policies:
        winner = next(arm for arm in arms if arm.name == WINNER_NAME)
        lengths = [len(prompt.inputs.input_ids_T) for prompt in prompts]
        kv = int(median(lengths)) + config.max_new_tokens // 4
        arms += policy_arms(winner, config.policies, table, kv)
    arms += [Arm(name, reference=name) for name in config.references]
    load_s = time.perf_counter() - start
    report = bench_arms(
        target, arms, prompts, config, table=table, deployment=deployment, quiet=quiet
    )
    report.seconds_by_stage["load"] = load_s
    if config.out is not None:
        inputs: dict[str, Path | str] = {n: Path(f) for n, f in config.drafts.items()}
        if table is not None:
            inputs["table"] = table.hash
        save_bench(report, config.out, provenance("bench", config, config.seed, inputs, deployment))
    return report


def _require_policies(config: BenchConfig, table: LatencyTable | None) -> None:
    """Refuse policies that the winner cannot have, before a target is loaded.

    Raises:
        UserError: No winner, a policy given twice, or as `build_policy`.
    """
    if not config.policies:
        return
    names = list(config.policies)
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"policy {', '.join(doubles)} is given twice; give each once")
    if WINNER_NAME not in config.drafts:
        raise UserError(
            f"policies {', '.join(names)} are the winner's, and no draft is called "
            f"'{WINNER_NAME}': give --draft {WINNER_NAME}=DIR"
        )
    if table is not None and "adaptive" in names:
        warn_of_free_decisions(table)
    folder = Path(config.drafts[WINNER_NAME])
    described = load_draft_config(folder)
    tree = own_tree(folder, described, config.chain)
    kv = 0 if table is None else table.grid("target_step").kv_range[0]
    for name in names:
        build_policy(name, described, tree, table, kv)
