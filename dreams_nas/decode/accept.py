"""Which drafted tokens the target would have written itself."""

from collections.abc import Sequence


def accept_greedy(
    children: Sequence[Sequence[int]], drafted: Sequence[int], chosen: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Follow the target's greedy choices through the tree.

    A host walk over at most L short lists, after the round's one transfer: it costs microseconds.

    Args:
        children: Verified rows below each verified row.
        drafted: Token of every node.
        chosen: The target's greedy token after every verified row (the root first).

    Returns:
        Verified rows to keep, the root first, and the tokens gained: the accepted ones and the
        bonus token.
    """
    rows, tokens = [0], [chosen[0]]
    while True:
        wanted = tokens[-1]
        for row in children[rows[-1]]:
            if drafted[row - 1] == wanted:
                break
        else:
            return rows, tokens
        rows.append(row)
        tokens.append(chosen[row])


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Verified rows below each verified row, from the verified row of each node's parent."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for row, parent in enumerate(parents, 1):
        found[parent].append(row)
    return found


def clip_accepted(num_accepted: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Accepted tokens of each round without those beyond the end of the answer.

    Args:
        num_accepted: As the engine counted them; the last round may run over the end.
        num_tokens: Tokens of the answer, the one from prefill included.
    """
    left, clipped = num_tokens - 1, []
    for accepted in num_accepted:
        clipped.append(min(accepted, left))
        left -= min(accepted + 1, left)
    return tuple(clipped)
