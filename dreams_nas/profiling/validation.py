"""Whole drafts and whole rounds that were not used to build a table, against its predictions.

The table is judged by drafts that no block was taken from: random ones of the space and, where they
are known, the finalists of a search. Its two corners, between which the rest of a step was
averaged, are a group of their own.

Drafts are the draft's part of a round: a sync and all levels of a tree. Rounds come out of the
decoder itself (`forced.py`). Beside the table stand two predictors that know no blocks: a constant,
and a line through the arithmetic operations of each case, both fitted to the very measurements they
are judged by, which flatters them.

Shapes: N rounds.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.table import LatencyTable
from dreams_nas.profiling.draft_passes import DraftPasses
from dreams_nas.profiling.forced import RoundTimes, measure_rounds, predict_rounds
from dreams_nas.profiling.metrics import error_report, fit_line
from dreams_nas.profiling.random_drafts import RandomDrafts
from dreams_nas.profiling.timers import (
    MOST_OVERRUN,
    Clock,
    Point,
    TimerConfig,
    measure_points,
)
from dreams_nas.space.arch import DraftArch, TargetDims
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import Target, TargetInputs

_CORNER = "corner"


class Case(NamedTuple):
    """One draft, tree and prompt length to compare."""

    group: str
    """corner (the table was built with its steps), random or finalist."""
    arch: DraftArch
    tree: StaticTree
    kv: int
    """Rows of the prompt."""


class Comparison(NamedTuple):
    """A predicted and a measured time of the same thing."""

    case: Case
    predicted_ms: float
    measured_ms: float


def choose_cases(
    space: SearchSpace,
    dims: TargetDims,
    trees: Sequence[StaticTree],
    kvs: Sequence[int],
    num_random: int,
    rng: np.random.Generator,
) -> list[Case]:
    """The corners of a space and random drafts of it, each with every tree, prompts in turn."""
    known = space.enumerate(dims)
    corners = [space.canonical(arch, dims) for arch in (space.smallest(), space.largest())]
    others = [arch for arch in known if arch not in corners]
    picks = rng.permutation(len(others))[:num_random]
    archs = [(_CORNER, arch) for arch in dict.fromkeys(corners)]
    archs += [("random", others[int(i)]) for i in picks]
    return [
        Case(group, arch, tree, kvs[(i + j) % len(kvs)])
        for i, (group, arch) in enumerate(archs)
        for j, tree in enumerate(trees)
    ]


def accepted_schedule(tree: StaticTree, num_rounds: int) -> list[int]:
    """How many nodes each round accepts: every number from none to all levels, in turn."""
    return [i % (tree.num_levels + 1) for i in range(num_rounds)]


def validate_table(
    table: LatencyTable,
    target: Target,
    cases: Sequence[Case],
    clock: Clock,
    rng: np.random.Generator,
    *,
    drafts: RandomDrafts | None = None,
    num_rounds: int = 7,
    budget_s: float = 20.0,
    min_visits: int = 3,
) -> dict[str, Any]:
    """Measure the cases and compare.

    Args:
        table: Its entries must cover the cases.
        target: The table's target.
        cases: What to measure; visited in random order, again and again.
        clock: Injected; times the draft's part and the budget. Rounds are timed by the decoder.
        rng: Orders the visits.
        drafts: Random drafts; by default new ones.
        num_rounds: Rounds of each visit.
        budget_s: Seconds, about a third of them for drafts alone.
        min_visits: Least visits of each case, for which a quarter more of the budget may be spent;
            one visit is made in any case.

    Returns:
        What goes into `table.validation`: `rounds`, `first_rounds` (with the draft's prefill) and
        `drafts`, each with `table`, the errors of the unseen drafts, those of the `baselines` over
        the same, and those `by_group`; and `num_visits`, the least of any case.
    """
    if drafts is None:
        drafts = RandomDrafts(target, 1, max(case.arch.depth for case in cases))
    dims = target.spec.dims
    costs = {arch: CostModel(table, arch, dims) for arch in {case.arch for case in cases}}
    draft_times = _measure_drafts(
        target, drafts, cases, costs, clock, rng, budget_s / 3, min_visits
    )
    first, later, num_visits = _measure_rounds(
        target, drafts, cases, costs, clock, rng, num_rounds, budget_s * 2 / 3, min_visits
    )
    return {
        "rounds": _report(later, dims, with_target=True),
        "first_rounds": _report(first, dims, with_target=True),
        "drafts": _report(draft_times, dims, with_target=False),
        "num_visits": num_visits,
    }


def _measure_drafts(
    target: Target,
    drafts: RandomDrafts,
    cases: Sequence[Case],
    costs: dict[DraftArch, CostModel],
    clock: Clock,
    rng: np.random.Generator,
    budget_s: float,
    min_visits: int,
) -> list[Comparison]:
    """Sync of half the levels and the whole tree, after a pass of the target."""
    cache = target.build_cache(max(case.kv for case in cases) + 1)
    target.prefill(TargetInputs(drafts.tokens(cache.capacity - 1)), cache)
    root_1 = drafts.tokens(1)

    def disturb() -> None:
        target.verify(root_1, root_1 * 0, None, cache)
        cache.commit([])

    points, predicted = [], []
    for index, case in enumerate(cases):
        num_new = 1 + case.tree.num_levels // 2
        passes = DraftPasses(target, drafts, case.kv, num_new)
        one = passes.sync_and_propose(drafts.ready(case.arch), case.tree, num_new, disturb)
        points.append(Point(str(index), one.run, one.prepare))
        predicted.append(predict_draft_ms(costs[case.arch], case.tree, num_new, case.kv))
    config = TimerConfig(warmup=1, min_sweeps=min_visits, max_regates=0)
    found = measure_points(points, clock, rng, config, budget_s=budget_s)
    return [
        Comparison(case, ms, found.timings[point.key].median_ms)
        for case, ms, point in zip(cases, predicted, points, strict=True)
    ]


def predict_draft_ms(costs: CostModel, tree: StaticTree, num_new: int, kv: int) -> float:
    """The draft's part of a round: sync of `num_new` rows over kv, then the tree's levels."""
    total = float(costs.t_sync(num_new, kv))
    seen = kv + num_new
    for width in tree.step_widths:
        total += float(costs.t_step(width, seen))
        seen += width
    return total


def _measure_rounds(
    target: Target,
    drafts: RandomDrafts,
    cases: Sequence[Case],
    costs: dict[DraftArch, CostModel],
    clock: Clock,
    rng: np.random.Generator,
    num_rounds: int,
    budget_s: float,
    min_visits: int,
) -> tuple[list[Comparison], list[Comparison], int]:
    """First rounds and the mean of the later ones of every case; the least number of visits."""
    prompts = {kv: TargetInputs(drafts.tokens(kv)) for kv in {case.kv for case in cases}}

    def visit(case: Case) -> RoundTimes:
        schedule = accepted_schedule(case.tree, num_rounds)
        ready = drafts.ready(case.arch)
        return measure_rounds(target, ready, case.tree, prompts[case.kv], schedule)

    visits: list[list[RoundTimes]] = [[] for _ in cases]
    started = clock.now()

    def has_time() -> bool:
        num_done = min(len(found) for found in visits)
        share = 1.0 if num_done >= min_visits else MOST_OVERRUN
        return not num_done or clock.now() < started + share * budget_s

    order = _endless_order(len(cases), rng)
    while has_time():
        index = next(order)
        visits[index].append(visit(cases[index]))
    first, later = [], []
    for case, found in zip(cases, visits, strict=True):
        measured_N = np.median([one.round_ms_N for one in found], axis=0)
        predicted_N = predict_rounds(costs[case.arch], case.tree, found[0].walk)
        first.append(Comparison(case, float(predicted_N[0]), float(measured_N[0])))
        mean = float(predicted_N[1:].mean()), float(measured_N[1:].mean())
        later.append(Comparison(case, *mean))
    return first, later, min(len(found) for found in visits)


def _endless_order(num_cases: int, rng: np.random.Generator) -> Iterator[int]:
    """All cases in random order, again and again."""
    while True:
        yield from (int(index) for index in rng.permutation(num_cases))


def _report(found: Sequence[Comparison], dims: TargetDims, with_target: bool) -> dict[str, Any]:
    """Errors of the unseen drafts, of baselines over them, and of every group."""
    # A space of no more than its corners has no others to be judged by; the groups say so.
    judged = [one for one in found if one.case.group != _CORNER] or list(found)
    measured = np.array([one.measured_ms for one in judged])
    operations = np.array([num_operations(one.case, dims, with_target) for one in judged])
    baselines = {
        "constant": np.full(len(judged), np.mean(measured)),
        "operations": fit_line(operations, measured),
    }
    groups = list(dict.fromkeys(one.case.group for one in found))
    return {
        "table": _errors(judged, [one.predicted_ms for one in judged]),
        "judged_by": list(dict.fromkeys(one.case.group for one in judged)),
        "by_group": {
            name: _errors(of_group, [one.predicted_ms for one in of_group])
            for name in groups
            for of_group in [[one for one in found if one.case.group == name]]
        },
        "baselines": {name: _errors(judged, list(ms)) for name, ms in baselines.items()},
        "cases": [
            {
                "group": one.case.group,
                "arch": one.case.arch.key,
                "levels": one.case.tree.num_levels,
                "nodes": one.case.tree.num_nodes,
                "kv": one.case.kv,
                "predicted_ms": one.predicted_ms,
                "measured_ms": one.measured_ms,
            }
            for one in found
        ],
    }


def _errors(
    found: Sequence[Comparison], predicted: Sequence[float]
) -> dict[str, float | int | None]:
    measured = [one.measured_ms for one in found]
    return error_report(predicted, measured, [one.case.arch.depth for one in found])


def num_operations(case: Case, dims: TargetDims, with_target: bool) -> float:
    """Multiplications of a round's matrices, attention left out."""
    sizes = case.arch.sizes(dims)

    def layer(inputs: int, num_heads: int, num_kv_heads: int, ffn: int) -> int:
        projections = (num_heads + 2 * num_kv_heads) * dims.head_size * inputs
        return projections + num_heads * dims.head_size * dims.hidden + 3 * ffn * dims.hidden

    args = (sizes.num_heads, sizes.num_kv_heads, sizes.ffn)
    layers = layer(2 * dims.hidden, *args) + (case.arch.depth - 1) * layer(dims.hidden, *args)
    head = sizes.vocab * dims.hidden
    rows = 1 + sum(case.tree.step_widths)
    fusion = len(sizes.target_layer_ids) * dims.hidden**2
    total = rows * (layers + head) + fusion
    if with_target:
        block = layer(dims.hidden, dims.num_heads, dims.num_kv_heads, dims.ffn)
        verified = dims.num_layers * block + dims.vocab * dims.hidden
        total += (case.tree.num_nodes + 1) * verified
    return float(total)
