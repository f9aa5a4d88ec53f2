"""The latency table: every block of a decoding round, measured on one deployment, in one file."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.console import warn
from dreams_nas.core.device import Deployment, DeviceIdentity
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import hash_json, read_json, write_json
from dreams_nas.core.provenance import package_versions
from dreams_nas.latency.blocks import (
    DIM_CHOICES,
    SPECS,
    Block,
    Dims,
    GroupKey,
    describe_group,
    group_key,
)
from dreams_nas.latency.grid import Grid

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "latency-table/2"


class TableHeader(Config):
    """What the numbers are true for."""

    identity: DeviceIdentity
    """The device that was measured."""
    deployment: Deployment
    """How it was used: dtype, mode, attention backend, threads, batch, quantisation."""
    shape_hash: str
    """Hash of the target's shape: equal shapes cost the same time."""
    torch: str
    """Version of torch."""
    transformers: str
    """Version of transformers."""
    date: str = ""
    """When it was measured, UTC; not part of the table's hash."""
    command: str = ""
    """The command that measured it; not part of the table's hash."""


class LatencyEntry(Config):
    """One measured point."""

    block: Block
    """What was timed, see `blocks.SPECS`."""
    q: int = Field(ge=1)
    """Rows of the pass."""
    kv: int = Field(ge=0)
    """Rows in the cache before the pass."""
    dims: Dims = Field(default_factory=dict)
    """What tells it apart from others of its block."""
    median_ms: float = Field(ge=0)
    """Median, milliseconds."""
    p10_ms: float = Field(ge=0)
    """Tenth percentile, milliseconds."""
    p90_ms: float = Field(ge=0)
    """Ninetieth percentile, milliseconds."""
    n: int = Field(ge=1)
    """Raw measurements behind them."""

    @model_validator(mode="after")
    def _validate_entry(self) -> "LatencyEntry":
        spec = SPECS[self.block]
        if set(self.dims) != set(spec.dims):
            raise ValueError(
                f"block {self.block} has dims {sorted(spec.dims)}, got {sorted(self.dims)}"
            )
        for name, value in self.dims.items():
            choices = DIM_CHOICES.get(name)
            if choices is not None and value not in choices:
                raise ValueError(f"{name} = {value!r}: should be one of {', '.join(choices)}")
            if choices is None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} = {value!r}: should be a positive integer")
        if self.kv and not spec.has_kv:
            raise ValueError(f"block {self.block} does not depend on kv, which must be 0")
        if not self.p10_ms <= self.median_ms <= self.p90_ms:
            raise ValueError(
                f"p10 <= median <= p90 is broken: {self.p10_ms}, {self.median_ms}, {self.p90_ms}"
            )
        return self


class Sentinel(Config):
    """One point measured again and again, to see whether the machine drifted meanwhile."""

    block: Block
    """Block of the point."""
    q: int
    """Rows of the pass."""
    kv: int
    """Rows in the cache."""
    median_ms: tuple[float, ...]
    """Its medians in the order of time, milliseconds."""
    num_remeasured: int = Field(default=0, ge=0)
    """Entries that were measured again because the sentinel had drifted."""


class LatencyTable(Config):
    """All entries of one deployment and target shape."""

    header: TableHeader
    """What the numbers are true for."""
    sentinel: Sentinel | None = None
    """Stability of the machine while it was measured."""
    entries: tuple[LatencyEntry, ...] = Field(min_length=1)
    """The measured points."""
    validation: dict[str, Any] | None = None
    """Predicted against measured whole drafts and rounds; null before it was done."""

    @model_validator(mode="after")
    def _validate_entries(self) -> "LatencyTable":
        seen: set[tuple[GroupKey, int, int]] = set()
        for entry in self.entries:
            point = (group_key(entry.block, entry.dims), entry.q, entry.kv)
            if point in seen:
                where = f"q = {entry.q}, kv = {entry.kv}"
                raise ValueError(f"{describe_group(point[0])} is measured twice at {where}")
            seen.add(point)
        return self

    @cached_property
    def hash(self) -> str:
        """Short hash of header (without date and command) and entries."""
        dump = self.model_dump(mode="json", exclude={"header": {"date", "command"}})
        entries = sorted(dump["entries"], key=lambda e: hash_json(e))
        return hash_json({"header": dump["header"], "entries": entries})

    @cached_property
    def grids(self) -> dict[GroupKey, Grid]:
        """Interpolation of every block and dims, built once."""
        points: dict[GroupKey, list[tuple[int, int, float]]] = {}
        for e in self.entries:
            points.setdefault(group_key(e.block, e.dims), []).append((e.q, e.kv, e.median_ms))
        return {key: Grid(key, group) for key, group in points.items()}

    def grid(self, block: Block, **dims: int | str) -> Grid:
        """The measured points of one block.

        Raises:
            UserError: The table lacks it: names block, dims and what there is.
        """
        key = group_key(block, dims)
        if key not in self.grids:
            known = [describe_group(other) for other in self.grids if other[0] == block]
            raise UserError(
                f"the latency table lacks {describe_group(key)}; it has "
                f"{', '.join(known) or f'no {block}'}; measure it with `dreams-nas profile`, "
                "given the search space that you search"
            )
        return self.grids[key]

    def mismatches(
        self, deployment: Deployment, shape_hash: str, identity: DeviceIdentity | None = None
    ) -> list[str]:
        """Every way in which the table is not for this deployment and target, both values named."""
        header = self.header
        found = header.deployment.differences(deployment)
        if identity is not None and header.identity.kind == "cpu" == identity.kind:
            ours, theirs = header.identity.num_cores, identity.num_cores
            found += [f"num_cores: {ours} against {theirs}"] if ours != theirs else []
        if header.shape_hash != shape_hash:
            found.append(f"target shape: {header.shape_hash} against {shape_hash}")
        here = package_versions()
        for package in ("torch", "transformers"):
            measured = getattr(header, package)
            if measured != here[package]:
                found.append(f"{package}: {measured} against {here[package]}")
        return found

    def require_match(
        self,
        deployment: Deployment,
        shape_hash: str,
        identity: DeviceIdentity | None = None,
        *,
        allow_mismatch: bool = False,
    ) -> None:
        """Refuse a table of another device, dtype, mode, target or library version.

        Args:
            deployment: Where its numbers are to be used.
            shape_hash: Shape of the target that they are to be used for.
            identity: The device here; with it, core counts of CPUs are compared too.
            allow_mismatch: Warn instead.

        Raises:
            UserError: Names every difference with both values, the table's first.
        """
        found = self.mismatches(deployment, shape_hash, identity)
        if not found:
            return
        text = f"the latency table was measured for something else: {'; '.join(found)}"
        if not allow_mismatch:
            raise UserError(
                f"{text}; run `dreams-nas profile` here, or pass --allow-mismatch if you know "
                "that the times hold"
            )
        warn(text)

    def to_frame(self) -> "pd.DataFrame":
        """Entries as a pandas table, one column per dimension."""
        import pandas as pd

        return pd.DataFrame(
            [{**entry.model_dump(exclude={"dims"}), **entry.dims} for entry in self.entries]
        )


def save_table(table: LatencyTable, path: Path | str) -> None:
    """Write the table as JSON, atomically."""
    write_json(path, {"schema": SCHEMA, **table.model_dump(mode="json")}, indent=1)


def load_table(path: Path | str) -> LatencyTable:
    """Read and validate a table.

    Raises:
        UserError: Missing or broken file, another schema, or a wrong entry.
    """
    data = read_json(path)
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else None
        raise UserError(
            f"{path}: schema is {found!r}, expected {SCHEMA!r}; measure the table again with "
            "`dreams-nas profile`"
        )
    return build_config(
        LatencyTable, {key: value for key, value in data.items() if key != "schema"}, str(path)
    )
