"""Which drafted tokens the target would have written itself."""

from collections.abc import Sequence

from dreams_nas.decode.plan import TreePlan


def accept_greedy(
    plan: TreePlan, drafted: Sequence[int], chosen: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Follow the target's greedy choices through the tree.

    A host walk over at most L short lists, after the round's one transfer: it costs microseconds.

    Args:
        plan: The tree.
        drafted: Token of every node.
        chosen: The target's greedy token after every verified row (the root first).

    Returns:
        Verified rows to keep, the root first, and the tokens gained: the accepted ones and the
        bonus token.
    """
    rows, tokens = [0], [chosen[0]]
    while True:
        wanted = tokens[-1]
        for row in plan.children[rows[-1]]:
            if drafted[row - 1] == wanted:
                break
        else:
            return rows, tokens
        rows.append(row)
        tokens.append(chosen[row])


def cut_at_stop(
    tokens: Sequence[int], num_before: int, limit: int, stop_ids: frozenset[int]
) -> tuple[list[int], bool]:
    """End a block of new tokens exactly at the first end token or at the limit.

    Args:
        tokens: New tokens.
        num_before: Tokens generated before them.
        limit: Tokens allowed in all.
        stop_ids: End tokens; the one that ends the answer belongs to it.

    Returns:
        The tokens that count, and whether the answer ends with them.
    """
    kept = list(tokens[: limit - num_before])
    for index, token in enumerate(kept):
        if token in stop_ids:
            return kept[: index + 1], True
    return kept, num_before + len(kept) >= limit
