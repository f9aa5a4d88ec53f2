"""Further policies of the winner's draft as arms."""

from collections.abc import Sequence

from dreams_nas.bench.arms import Arm, policy_arm_name
from dreams_nas.core.console import warn
from dreams_nas.core.errors import UserError
from dreams_nas.decode.policies import build_policy
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.policy import PolicyName
from dreams_nas.space.tree import StaticTree


def policy_arms(
    winner: Arm, policies: Sequence[PolicyName], table: LatencyTable | None, kv: int
) -> list[Arm]:
    """The winner's draft with further policies; its own tree is not timed a second time.

    Raises:
        UserError: The winner drafts nothing, or as `build_policy`.
    """
    if not policies:
        return []
    if winner.draft is None:
        raise UserError("there are no further policies of a winner that drafts nothing")
    arms = []
    for policy in policies:
        name = policy_arm_name(policy)
        found = build_policy(policy, winner.draft.config, winner.tree, table, kv)
        if found == winner.tree:
            warn(f"policy '{policy}' is the winner's own tree: arm '{winner.name}' times it")
        elif isinstance(found, StaticTree):
            arms.append(Arm(name, winner.draft, found))
        else:
            arms.append(Arm(name, winner.draft, grown=found))
    return arms
