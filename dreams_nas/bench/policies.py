"""Further policies for one draft: a chain, a dynamic tree, the adaptive rule."""

from collections.abc import Sequence

import numpy as np

from dreams_nas.bench.arms import Arm, policy_arm_name
from dreams_nas.bench.config import PolicyName
from dreams_nas.core.errors import UserError
from dreams_nas.decode.adaptive import RoundCosts, adaptive_plan
from dreams_nas.decode.dynamic import dynamic_plan
from dreams_nas.draft.config import DraftConfig
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.policy import DynamicTree
from dreams_nas.space.tree import StaticTree

_COMMITTED = 3
"""Rows of a typical sync."""


def round_costs(table: LatencyTable, config: DraftConfig, tree: DynamicTree, kv: int) -> RoundCosts:
    """What the parts of a round cost with this draft, as far as they were measured.

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
    rows_Q = np.arange(2, min(tree.num_nodes + 1, costs.max_verify_rows()) + 1)
    verify_Q = costs.t_verify(rows_Q, kv) + costs.t_tree(rows_Q) + costs.t_commit(rows_Q)
    return RoundCosts(
        sync_ms=float(costs.t_sync(min(_COMMITTED, costs.max_sync_rows), kv)),
        step_ms=np.asarray(costs.t_step(rows_W, kv), dtype=np.float64),
        # A lone root is a plain step.
        verify_ms=np.concatenate([[float(costs.t_ar(kv))], verify_Q]),
    )


def policy_arms(
    winner: Arm, policies: Sequence[PolicyName], table: LatencyTable | None, kv: int
) -> list[Arm]:
    """The winner's draft with further policies.

    Raises:
        UserError: The winner drafts nothing, is not calibrated, or there is no table to decide by.
    """
    if not policies:
        return []
    if winner.draft is None:
        raise UserError("there are no further policies of a winner that drafts nothing")
    config = winner.draft.config
    arms = []
    for policy in policies:
        name = policy_arm_name(policy)
        if policy == "chain":
            levels = max(1, winner.tree.num_levels)
            arms.append(Arm(name, winner.draft, StaticTree.chain(levels)))
        elif policy == "dynamic":
            nodes, levels = max(1, winner.tree.num_nodes), max(1, winner.tree.num_levels)
            width = next(w for w in range(1, nodes + 1) if w + (levels - 1) * w * w >= nodes)
            tree = DynamicTree(num_levels=levels, width=max(2, width), num_nodes=nodes)
            arms.append(Arm(name, winner.draft, grown=dynamic_plan(tree)))
        else:
            if config.calibration is None:
                raise UserError(
                    "policy 'adaptive' needs calibrated path probabilities, and the winner's "
                    "config.json has none: run `dreams-nas calibrate --draft DIR`"
                )
            if table is None:
                raise UserError("policy 'adaptive' decides by measured costs; give --table FILE")
            costs = round_costs(table, config, config.calibration.tree, kv)
            arms.append(Arm(name, winner.draft, grown=adaptive_plan(config.calibration, costs)))
    return arms
