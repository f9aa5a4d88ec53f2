"""What is compared: plain decoding, and drafts with a tree each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreams_nas.bench.references import decode_reference
from dreams_nas.core.errors import UserError
from dreams_nas.decode.adaptive import AdaptivePlan
from dreams_nas.decode.drafting import ReadyDraft, ready_draft
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.decode.engine import DecodeResult, Plan, build_plan, decode
from dreams_nas.decode.loading import load_draft_and_tree, require_draft_folder
from dreams_nas.decode.parts import Parts
from dreams_nas.draft.model import DraftModel
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import Target, TargetInputs

PLAIN_NAME = "plain"
WINNER_NAME = "winner"
BASELINE_NAME = "eagle3"


NO_TREE = StaticTree()


@dataclass(frozen=True)
class Arm:
    """One way to decode."""

    name: str
    """Unique among the arms of a bench."""
    draft: DraftModel | None = None
    """Who proposes; None is plain decoding. On the target's device, in its dtype."""
    tree: StaticTree = NO_TREE
    """What is proposed; the empty tree decodes plainly."""
    grown: DynamicPlan | AdaptivePlan | None = None
    """How trees are grown anew in every round, instead of `tree`."""
    reference: str | None = None
    """Which way of transformers decodes instead of this package, one of `REFERENCE_NAMES`."""

    @property
    def is_speculative(self) -> bool:
        """Whether anything is drafted."""
        return self.draft is not None and (self.grown is not None or self.tree.num_nodes > 0)

    @property
    def num_levels(self) -> int:
        """Longest path that is drafted."""
        return self.tree.num_levels if self.grown is None else self.grown.num_levels

    @property
    def num_nodes(self) -> int:
        """Most nodes that are verified in a round."""
        return self.tree.num_nodes if self.grown is None else self.grown.num_nodes

    def describe_policy(self) -> dict[str, Any]:
        """What reports print of what is drafted."""
        return self.tree.describe() if self.grown is None else self.grown.describe()


PLAIN = Arm(PLAIN_NAME)
"""Plain decoding in the same runtime: what every speedup is relative to."""


@dataclass(frozen=True)
class ReadyArm:
    """An arm bound to its target."""

    arm: Arm
    draft: ReadyDraft | None
    plan: Plan | None


def ready_arm(arm: Arm, target: Target) -> ReadyArm:
    """Bind an arm.

    Raises:
        UserError: The draft belongs to another target.
    """
    if not arm.is_speculative or arm.draft is None:
        return ReadyArm(arm, None, None)
    plan = build_plan(arm.tree, target) if arm.grown is None else arm.grown
    return ReadyArm(arm, ready_draft(arm.draft, target), plan)


def decode_arm(
    target: Target,
    ready: ReadyArm,
    inputs: TargetInputs,
    max_new_tokens: int,
    *,
    want_record: bool = False,
    parts: Parts | None = None,
) -> DecodeResult:
    """Decode one prompt as this arm does."""
    if ready.arm.reference is not None:
        return decode_reference(target, ready.arm.reference, inputs, max_new_tokens)
    return decode(
        target,
        inputs,
        max_new_tokens=max_new_tokens,
        draft=ready.draft,
        plan=ready.plan,
        want_record=want_record,
        parts=parts,
    )


def policy_arm_name(policy: str) -> str:
    """Name of the winner's arm with another policy."""
    return f"{WINNER_NAME}_{policy}"


def require_arms(arms: Sequence[Arm]) -> None:
    """Refuse arms that cannot be compared.

    Raises:
        UserError: No arm `plain`, or a name that occurs twice.
    """
    names = [arm.name for arm in arms]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"the arms {', '.join(doubles)} occur twice; names must be unique")
    if not any(arm == PLAIN for arm in arms):
        raise UserError(
            f"the arms are {', '.join(names) or 'none'}; one must be '{PLAIN_NAME}' and decode "
            "plainly, or there is nothing to be faster than"
        )


def load_arm(name: str, folder: Path, target: Target, chain: int | None = None) -> Arm:
    """Read a draft folder as an arm; the tree is the one stored with the draft.

    Args:
        name: Name of the arm.
        folder: Draft checkpoint.
        target: Whose device and dtype the draft takes.
        chain: Levels of a chain to draft instead.

    Raises:
        UserError: No such draft, another target's, or no tree stored and no chain given.
    """
    return Arm(name, *load_draft_and_tree(folder, target, chain))


def parse_drafts(texts: Sequence[str]) -> dict[str, str]:
    """Turn what `--draft` was given, DIR or NAME=DIR, into folders by arm.

    The first one without a name is the winner, later ones are called like their folder. A folder
    whose own name holds a "=" is taken as one.

    Raises:
        UserError: A name that is taken.
    """
    drafts: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).is_dir():
            folder = text
            name = Path(text).resolve().name if WINNER_NAME in drafts else WINNER_NAME
        if name in (PLAIN_NAME, "") or name in drafts:
            raise UserError(
                f"--draft {text}: the arm name '{name}' is taken or empty; write NAME=DIR with "
                f"another name (not '{PLAIN_NAME}')"
            )
        drafts[name] = folder
    return drafts


def require_draft_folders(drafts: Mapping[str, str]) -> None:
    """Refuse missing draft folders before a target is loaded.

    Raises:
        UserError: A folder without a draft.
    """
    for name, folder in drafts.items():
        require_draft_folder(name, folder)
