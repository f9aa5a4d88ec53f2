"""`profile`: the latency table of this deployment for one target and one search space."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import torch

from dreams_nas.core.console import Progress, progress, say, warn
from dreams_nas.core.device import Deployment, build_deployment, identify_device
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import format_bytes
from dreams_nas.core.lock import machine_lock, warn_if_loaded
from dreams_nas.core.provenance import command_line, package_versions
from dreams_nas.core.seeds import derive_seed
from dreams_nas.latency.table import LatencyTable, Sentinel, TableHeader
from dreams_nas.profiling.config import ProfileConfig
from dreams_nas.profiling.draft_blocks import DraftBlocks
from dreams_nas.profiling.draft_passes import DraftPasses
from dreams_nas.profiling.grids import Grids, likely_tree, plan_grids
from dreams_nas.profiling.points import PointSet
from dreams_nas.profiling.random_drafts import RandomDrafts
from dreams_nas.profiling.target_blocks import TargetBlocks
from dreams_nas.profiling.threads import compare_threads
from dreams_nas.profiling.timers import (
    Clock,
    DeviceClock,
    Measurement,
    Point,
    measure_points,
)
from dreams_nas.profiling.validation import choose_cases, validate_table
from dreams_nas.space.search_space import PolicySpace, SearchSpace
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import Target

_BUILD_SHARE = 0.7
"""Share of the budget for blocks; the rest is for validation."""
_LEAST_VALIDATION_SHARE = 0.15
"""Share of the budget that validation has even where building took longer than its own."""
_NUM_ROUNDS = 7
"""Rounds of a validation case: enough to accept every number of levels that most spaces have."""


class _Blocks(NamedTuple):
    """All that is measured to build a table."""

    points: PointSet
    target: TargetBlocks
    grids: Grids
    drafts: RandomDrafts


def profile(
    target: Target,
    space: SearchSpace,
    config: ProfileConfig,
    *,
    clock: Clock | None = None,
    quiet: bool = False,
) -> LatencyTable:
    """Measure every block and shape that a decoding round in this space can need.

    Takes the machine's lock, warns when other processes are busy, and ends with whole drafts and
    rounds that the table has not seen (`table.validation`). The budget is kept but for a bounded
    rest: on a busy machine fewer sweeps are done, and it says how many.

    Args:
        target: Loaded on the device and in the dtype of the config.
        space: Drafts and policies.
        config: Deployment, sizes, budget. Its target, space and out are not read here.
        clock: By default wall time that waits for the device.
        quiet: No progress.

    Raises:
        UserError: The target is loaded with another dtype, or space and sizes do not fit it.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    if dtype != config.dtype:
        raise UserError(f"dtype = {config.dtype}: the target is loaded in {dtype}; load it so")
    device = str(target.device)
    deployment = build_deployment(
        device, config.dtype, attention=config.attention, threads=config.threads
    )
    clock = clock or DeviceClock(device)
    with machine_lock("profile", quiet=quiet), torch.inference_mode():
        torch.set_num_threads(deployment.threads)
        load = warn_if_loaded()
        started = clock.now()
        blocks = _build_blocks(target, space, config)
        _say_sizes(blocks, config, quiet)
        total = round(config.budget_s)
        with progress("measuring", total, quiet) as bar:
            table, found = _measure(target, blocks, config, deployment, clock, bar)
            bar.describe("validating")
            left_s = config.budget_s - (clock.now() - started)
            left_s = max(left_s, config.budget_s * _LEAST_VALIDATION_SHARE)
            validation = _validate(table, target, space, blocks, config, clock, left_s)
        validation["one_thread"] = compare_threads(blocks.points, deployment.threads, clock)
        torch.set_num_threads(deployment.threads)
        validation["other_processes_cores"] = load
        validation["num_sweeps"] = found.num_sweeps
        validation["unsteady"] = found.unsteady
        validation["seconds"] = clock.now() - started
    _say_effort(validation, config, quiet)
    if found.unsteady:
        warn(
            f"{len(found.unsteady)} of {len(blocks.points.points)} points stayed unsteady (median "
            f"over {config.timer.gate:g} times the tenth percentile), e.g. {found.unsteady[0]}; "
            "is the machine busy?"
        )
    return table.replace(validation=validation)


def _build_blocks(target: Target, space: SearchSpace, config: ProfileConfig) -> _Blocks:
    """Points in the order in which their entries stand on each other."""
    dims = target.spec.dims
    grids = plan_grids(
        space, dims, target.spec.max_positions, max_kv=config.max_kv, max_q=config.max_q
    )
    drafts = RandomDrafts(target, derive_seed(config.seed, "profile"), grids.depths[-1])
    most_taps = max((a.sizes(dims).target_layer_ids for a in space.enumerate(dims)), key=len)
    on_target = TargetBlocks(target, drafts, grids, most_taps)
    passes = DraftPasses(target, drafts, grids.mid_kv, grids.max_rows)
    of_draft = DraftBlocks(target, drafts, passes, grids)
    smallest, largest = space.smallest(), space.largest()
    # Wide steps need as many guesses of one row as they have rows.
    wide = min((v for v in space.vocab if v * dims.vocab >= 2 * grids.step_rows[-1]), default=1.0)
    references = list(dict.fromkeys([smallest.replace(vocab=wide), largest]))
    draft_act = passes.sync_and_propose(drafts.ready(largest), StaticTree.chain(1), 1, lambda: None)
    target_act = on_target.step(grids.mid_kv)

    def act_of_draft() -> None:
        draft_act.restart()
        draft_act.run()

    points = PointSet()
    on_target.add_passes(points, act_of_draft)
    on_target.add_host(points)
    on_target.add_prefills(points)
    of_draft.add_layers(points)
    of_draft.add_heads(points, target_act)
    of_draft.add_fusion(points, target_act)
    of_draft.add_syncs(points, target_act)
    of_draft.add_rest(points, references)
    of_draft.add_prefills(points, target_act)
    return _Blocks(points, on_target, grids, drafts)


def _say_sizes(blocks: _Blocks, config: ProfileConfig, quiet: bool) -> None:
    grids = blocks.grids
    cache = getattr(blocks.target.cache, "num_bytes", None)
    say(
        f"profile: {len(blocks.points.points)} points for {blocks.points.num_entries} entries; "
        f"verify of up to {grids.max_rows} rows over up to {grids.max_kv}; "
        f"target cache {'-' if cache is None else format_bytes(cache)}; "
        f"budget {config.budget_s:g} s",
        quiet,
    )


def _say_effort(validation: dict[str, Any], config: ProfileConfig, quiet: bool) -> None:
    num_sweeps, least = validation["num_sweeps"], config.timer.min_sweeps
    say(
        f"profile: {validation['seconds']:.0f} s; sweeps over all points: {num_sweeps}, visits of "
        f"each validation case: {validation['num_visits']}",
        quiet,
    )
    if num_sweeps < least:
        warn(
            f"only {num_sweeps} of at least {least} sweeps fit in the budget of "
            f"{config.budget_s:g} s; raise --budget-s, or measure when the machine is idle"
        )


def _measure(
    target: Target,
    blocks: _Blocks,
    config: ProfileConfig,
    deployment: Deployment,
    clock: Clock,
    bar: Progress,
) -> tuple[LatencyTable, Measurement]:
    rng = np.random.default_rng(derive_seed(config.seed, "profile", "order"))
    points = list(blocks.points.points.values())
    kv = blocks.grids.mid_kv
    sentinel = Point("sentinel", blocks.target.step(kv))
    found = measure_points(
        points,
        clock,
        rng,
        config.timer,
        budget_s=config.budget_s * _BUILD_SHARE,
        sentinel=sentinel,
        advance=bar.advance,
    )
    versions = package_versions()
    header = TableHeader(
        identity=identify_device(str(target.device)),
        deployment=deployment,
        shape_hash=target.spec.shape_hash,
        torch=str(versions["torch"]),
        transformers=str(versions["transformers"]),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command_line(),
    )
    remeasured = blocks.points.entries_with(found.remeasured)
    table = LatencyTable(
        header=header,
        sentinel=Sentinel(
            block="target_step",
            q=1,
            kv=kv,
            median_ms=tuple(found.sentinel_ms),
            num_remeasured=remeasured,
        ),
        entries=tuple(blocks.points.entries(found.timings)),
    )
    return table, found


def _validate(
    table: LatencyTable,
    target: Target,
    space: SearchSpace,
    blocks: _Blocks,
    config: ProfileConfig,
    clock: Clock,
    budget_s: float,
) -> dict[str, Any]:
    rng = np.random.default_rng(derive_seed(config.seed, "profile", "validation"))
    trees = validation_trees(space.policy, blocks.grids)
    max_kv = blocks.grids.max_kv
    most_gained = 1 + max(tree.num_levels for tree in trees)
    num_rounds = max(2, min(_NUM_ROUNDS, max_kv // (2 * most_gained)))
    longest = max(1, min(max_kv // 2, max_kv - num_rounds * most_gained))
    cases = choose_cases(
        space,
        target.spec.dims,
        trees,
        (min(blocks.grids.mid_kv, longest), longest),
        config.num_random_drafts,
        rng,
    )
    return validate_table(
        table,
        target,
        cases,
        clock,
        rng,
        drafts=blocks.drafts,
        num_rounds=num_rounds,
        budget_s=budget_s,
    )


def validation_trees(policy: PolicySpace, grids: Grids) -> Sequence[StaticTree]:
    """A small, a middle and a large policy of the space: a short chain, and trees it would use."""
    levels = max(1, policy.levels[1])
    most = grids.max_rows - 1
    if policy.kind == "chain":
        lengths = sorted({1, max(1, min(levels, most) // 2), min(levels, most)})
        return [StaticTree.chain(length) for length in lengths]
    trees = [
        StaticTree.chain(min(2, levels, most)),
        likely_tree(levels, max(1, most // 3)),
        likely_tree(levels, most),
    ]
    return list(dict.fromkeys(trees))
