"""What is found wrong with a run before anything is loaded."""

from dreams_nas.bench.arms import BASELINE_NAME
from dreams_nas.core.errors import UserError
from dreams_nas.pipeline.context import RunContext
from dreams_nas.space.arch import NAMED_ARCHS
from dreams_nas.targets.loading import check_target

COLLECTED_SPLITS = ("train", "choose", "score")
"""Splits whose answers are recorded; the fourth is decoded by the bench alone."""


def check_run(context: RunContext) -> None:
    """Find what can be found before anything is loaded.

    Raises:
        UserError: No such target, a broken data set, a sample in two splits, a space that is too
            large to search, or one without the baseline's point.
    """
    space, config = context.space, context.run
    check_target(config.target)
    if space.size > config.search.max_drafts:
        raise UserError(
            f"space '{config.space}' has {space.size} drafts, and exhaustive search takes up "
            f"to search.max_drafts = {config.search.max_drafts}; narrow the space or raise it"
        )
    if config.baseline.kind != "none" and not space.contains(NAMED_ARCHS[BASELINE_NAME]):
        raise UserError(
            f"space '{config.space}' lacks the point of {BASELINE_NAME} "
            f"({NAMED_ARCHS[BASELINE_NAME].key}), which the winner is to be measured against; "
            "add its choices, or set baseline.kind = none"
        )
    seen: dict[str, str] = {}
    for split in (*COLLECTED_SPLITS, "test"):
        for conversation in context.conversations(split):
            other = seen.setdefault(conversation.prompt_hash(), split)
            if other != split:
                raise UserError(
                    f"sample '{conversation.id}' is in the splits {other} and {split}; each "
                    "sample may be in one of them, or what is measured was learned by heart"
                )
