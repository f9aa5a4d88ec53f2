"""What the parts of a round cost on a deployment, for policies that decide by it."""

from dataclasses import dataclass

import numpy as np

from dreams_nas.core.console import warn
from dreams_nas.draft.config import DraftConfig
from dreams_nas.latency.blocks import group_key
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.grid import FloatArray
from dreams_nas.latency.monotone import rising_fit
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.policy import DynamicTree

_COMMITTED = 3
"""Rows of a typical sync."""


def warn_of_free_decisions(table: LatencyTable) -> None:
    """Say that a table is too old to price what an adaptive policy itself takes."""
    if group_key("host", {"part": "decide", "mask": "chain"}) not in table.grids:
        warn(
            "the latency table does not say what deciding costs, so the adaptive policy takes it "
            "for nothing; measure a new one with `dreams-nas profile`"
        )


@dataclass(frozen=True)
class RoundCosts:
    """Milliseconds of the parts of a round; none falls with its rows."""

    sync_ms: float
    """The draft commits the tokens of a round."""
    step_ms: FloatArray
    """A self-fed draft step of 1, 2, ... rows."""
    decide_ms: float
    """Ranking a level's guesses by probability and deciding on them."""
    chain_ms: FloatArray
    """Verifying a chain of 0, 1, 2, ... nodes, joining, accepting and committing included."""
    tree_ms: FloatArray
    """The same of a tree that is no chain."""


def round_costs(table: LatencyTable, config: DraftConfig, tree: DynamicTree, kv: int) -> RoundCosts:
    """What the parts of a round cost with this draft, as far as they were measured.

    A few rows more or less often cost nothing that a clock could tell, so neighbours are measured
    in any order; what is decided by are rising fits of them.

    Args:
        table: Of this deployment and target shape.
        config: The draft's.
        tree: Bounds of what is drafted.
        kv: Rows in the caches, typically.

    Raises:
        UserError: The table lacks one of the draft's blocks.
    """
    costs = CostModel(table, config.arch, config.target_dims)
    rows_W = np.arange(1, min(tree.width, costs.max_step_rows) + 1)
    verified = {}
    for mask in ("chain", "tree"):
        rows_Q = np.arange(2, min(tree.num_nodes + 1, costs.max_verify_rows(mask)) + 1)
        drafted = costs.t_verify(rows_Q, kv, mask)
        drafted = drafted + costs.t_tree(rows_Q, mask) + costs.t_commit(rows_Q, mask)
        if mask == "tree":
            drafted = drafted + costs.t_decide(rows_Q, mask)
        # A lone root is accepted and committed as the shortest chain is.
        alone = costs.t_root(kv) + costs.t_commit(2, "chain")
        verified[mask] = np.concatenate([[float(alone)], drafted])
    chain_ms, tree_ms = verified["chain"], verified["tree"]
    return RoundCosts(
        sync_ms=float(costs.t_sync(min(_COMMITTED, costs.max_sync_rows), kv)),
        step_ms=rising_fit(np.asarray(costs.t_step(rows_W, kv), dtype=np.float64)),
        decide_ms=float(costs.t_decide(1, "chain")),
        # Longer chains than were measured cost what trees of as many nodes do.
        chain_ms=rising_fit(np.concatenate([chain_ms, tree_ms[len(chain_ms) :]])),
        tree_ms=rising_fit(tree_ms),
    )
