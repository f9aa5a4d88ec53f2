"""Static draft trees, described by the rank paths of their nodes.

A node of level d is a path (r_1, ..., r_d): its token is the draft's r_d-th best guess (0 is the
best) after the path of its parent. The root is the last committed token and is not counted: a tree
has L levels and n nodes, and verifying it takes n + 1 target rows.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from pydantic import field_validator

from dreams_nas.core.config import Config

RankPath = tuple[int, ...]


class StaticTree(Config):
    """A fixed draft tree, nodes in level order. No nodes means: do not speculate. Hashable."""

    paths: tuple[RankPath, ...] = ()
    """Rank paths of the nodes, closed under prefix, sorted by level and then by ranks."""

    @field_validator("paths", mode="after")
    @classmethod
    def _validate_paths(cls, paths: tuple[RankPath, ...]) -> tuple[RankPath, ...]:
        known = set(paths)
        if len(known) != len(paths):
            raise ValueError(f"a draft tree names each node once; {len(paths)} paths hold doubles")
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(f"a rank path is one or more ranks of 0 or above, got {path}")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"node {path} needs its parent {path[:-1]} in the tree")
        return tuple(sorted(paths, key=lambda path: (len(path), path)))

    @classmethod
    def chain(cls, num_levels: int) -> "StaticTree":
        """The tree of one path: the draft's best guess at every level."""
        return cls(paths=tuple((0,) * level for level in range(1, num_levels + 1)))

    @classmethod
    def from_paths(cls, paths: Iterable[RankPath]) -> "StaticTree":
        """A tree of these nodes in any order."""
        return cls(paths=tuple(paths))

    @property
    def num_nodes(self) -> int:
        """n: drafted tokens per round, the root not counted."""
        return len(self.paths)

    @property
    def num_levels(self) -> int:
        """L: length of the longest path."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def is_chain(self) -> bool:
        """Whether the tree is a single path, so that plain causal attention verifies it."""
        return self.num_nodes == self.num_levels

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent among the nodes; -1 is the root."""
        index = {path: i for i, path in enumerate(self.paths)}
        return tuple(index.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def expanded(self) -> tuple[tuple[int, ...], ...]:
        """For each level d = 2..L the nodes of level d - 1 that have children (w_d of them)."""
        parents = set(self.parents)
        return tuple(
            tuple(i for i, path in enumerate(self.paths) if len(path) == level - 1 and i in parents)
            for level in range(2, self.num_levels + 1)
        )

    @property
    def step_widths(self) -> tuple[int, ...]:
        """w_d for d = 2..L: rows of each self-fed draft step."""
        return tuple(len(nodes) for nodes in self.expanded)

    def describe(self) -> dict[str, Any]:
        """What reports print: kind, levels, nodes and the paths."""
        kind = "none" if not self.paths else "chain" if self.is_chain else "static_tree"
        return {
            "kind": kind,
            "levels": self.num_levels,
            "nodes": self.num_nodes,
            "paths": [list(path) for path in self.paths],
        }
