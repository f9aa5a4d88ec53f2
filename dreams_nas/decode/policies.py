"""Policies by name: what a draft proposes in a round."""

from dreams_nas.core.errors import UserError
from dreams_nas.decode.adaptive import AdaptivePlan
from dreams_nas.decode.costs import round_costs
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.draft.config import DraftConfig
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.policy import MOST_LEVELS, DynamicTree, PolicyName
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
        UserError: A tree of no nodes or too many levels, a draft that is not calibrated, or no
            table to decide by.
    """
    nodes, levels = tree.num_nodes, tree.num_levels
    if name != "adaptive" and not nodes:
        raise UserError(
            f"policy '{name}' takes its size from the draft's own tree, and that is empty: the "
            "answer of its search is not to speculate; give --policy adaptive, or --chain LEVELS"
        )
    if name == "chain":
        return StaticTree.chain(levels)
    if name == "dynamic":
        if levels > MOST_LEVELS:
            raise UserError(
                f"policy 'dynamic' takes its size from the draft's tree of {levels} levels; a "
                f"dynamic tree has at most {MOST_LEVELS}"
            )
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
