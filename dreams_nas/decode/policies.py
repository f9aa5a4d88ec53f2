"""Policies by name: what a draft proposes in a round."""

from dreams_nas.core.errors import UserError
from dreams_nas.decode.adaptive import AdaptivePlan
from dreams_nas.decode.costs import round_costs
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.draft.config import DraftConfig
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.policy import DynamicTree, PolicyName
from dreams_nas.space.tree import StaticTree

Policy = StaticTree | DynamicPlan | AdaptivePlan


def build_policy(
    name: PolicyName,
    config: DraftConfig,
    tree: StaticTree,
    table: LatencyTable | None = None,
    kv: int = 0,
) -> Policy:
    """The policy of that name for a draft.

    Args:
        name: `chain` as long as the tree, `dynamic` as large as it, or `adaptive`.
        config: The draft's.
        tree: Its own tree.
        table: Of this deployment and target; `adaptive` decides by it.
        kv: Rows in the caches, typically.

    Raises:
        UserError: The draft is not calibrated, or there is no table to decide by.
    """
    nodes, levels = max(1, tree.num_nodes), max(1, tree.num_levels)
    if name == "chain":
        return StaticTree.chain(levels)
    if name == "dynamic":
        width = next(w for w in range(1, nodes + 1) if w + (levels - 1) * w * w >= nodes)
        return DynamicPlan(DynamicTree(num_levels=levels, width=max(2, width), num_nodes=nodes))
    if config.calibration is None:
        raise UserError(
            "policy 'adaptive' needs calibrated path probabilities, and the draft's config.json "
            "has none: run `dreams-nas calibrate --draft DIR`"
        )
    if table is None:
        raise UserError(
            "policy 'adaptive' decides by measured costs; give --table FILE, which "
            "`dreams-nas profile` writes"
        )
    costs = round_costs(table, config, config.calibration.tree, kv)
    return AdaptivePlan(config.calibration, costs)
