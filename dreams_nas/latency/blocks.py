"""The blocks that a latency table measures, and how each is told apart from its siblings.

A pass of q rows runs over kv rows that are already in the cache: its own q rows are not counted in
kv. Blocks without attention over a cache, and prefills, have kv = 0.
"""

from typing import Literal, NamedTuple, get_args

Block = Literal[
    "target_step",
    "verify",
    "target_prefill",
    "draft_layer",
    "draft_sync",
    "draft_fc",
    "draft_head",
    "draft_fixed",
    "draft_prefill",
    "host",
]

BLOCKS: tuple[Block, ...] = get_args(Block)

Dims = dict[str, int | str]


class BlockSpec(NamedTuple):
    """What entries of a block look like."""

    meaning: str
    """What is timed."""
    dims: tuple[str, ...]
    """Names of its dimensions; every entry has exactly these."""
    has_kv: bool
    """Whether its time depends on the rows in the cache."""


SPECS: dict[Block, BlockSpec] = {
    "target_step": BlockSpec("one plain decoding step of the target, q = 1", (), True),
    "verify": BlockSpec(
        "a target pass over q = n + 1 rows in a round, q = 1 where nothing was drafted; mask: "
        "chain or tree",
        ("mask",),
        True,
    ),
    "target_prefill": BlockSpec("the target over a prompt of q rows with its pixels", (), False),
    "draft_layer": BlockSpec(
        "one layer of a self-fed draft pass; position: first (reads twice the hidden size) or next",
        ("num_kv_heads", "ffn", "position"),
        True,
    ),
    "draft_sync": BlockSpec(
        "the draft commits q rows after a target pass: all its layers, of which the last answers "
        "for one row, and all seams, without its fusion and head",
        ("num_kv_heads", "ffn", "depth"),
        True,
    ),
    "draft_fc": BlockSpec("fusing the tapped features of q committed rows", ("taps",), False),
    "draft_head": BlockSpec(
        "final norm, head and top-k of q rows; kind: sync (level 1, q = 1) or step",
        ("vocab", "kind"),
        False,
    ),
    "draft_fixed": BlockSpec(
        "the rest of a self-fed draft pass of q rows: embedding, rotary, mask, cache writes",
        (),
        False,
    ),
    "draft_prefill": BlockSpec(
        "the draft over q kept prompt rows: fusion, layers and the rest, without its head",
        ("num_kv_heads", "ffn", "depth", "taps"),
        False,
    ),
    "host": BlockSpec(
        "host work of a round with q = n + 1 rows; part: tree, accept, commit, or decide (what an "
        "adaptive policy adds: chain, to a level of one row; tree, to a tree of q rows); mask: "
        "chain (commits a prefix) or tree (gathers rows)",
        ("part", "mask"),
        False,
    ),
}
"""What each block measures; `profiling` and `CostModel` both stand on it."""

DIM_CHOICES: dict[str, tuple[str, ...]] = {
    "mask": ("chain", "tree"),
    "position": ("first", "next"),
    "kind": ("sync", "step"),
    "part": ("tree", "accept", "commit", "decide"),
}
"""Legal values of the dimensions that are names; the others are positive integers."""

GroupKey = tuple[str, tuple[tuple[str, int | str], ...]]


def group_key(block: str, dims: Dims) -> GroupKey:
    """Key of the entries that differ only in q and kv."""
    return block, tuple(sorted(dims.items()))


def describe_group(key: GroupKey) -> str:
    """Text for errors, e.g. "draft_layer(ffn=512, num_kv_heads=2, position=next)"."""
    block, dims = key
    return f"{block}({', '.join(f'{name}={value}' for name, value in dims)})" if dims else block
