"""A latency table made of formulas, linear in q and kv, so that interpolation is exact anywhere."""

from collections.abc import Iterator, Sequence
from itertools import product

from dreams_nas.core.device import Deployment, DeviceIdentity
from dreams_nas.core.provenance import package_versions
from dreams_nas.latency.blocks import SPECS, Block, Dims
from dreams_nas.latency.table import LatencyEntry, LatencyTable, TableHeader
from dreams_nas.space.arch import TargetDims
from dreams_nas.space.search_space import SearchSpace

DIMS = TargetDims(
    hidden=192, num_layers=8, num_heads=8, num_kv_heads=4, head_size=24, ffn=512, vocab=4096
)
QS = (*range(1, 17), 17, 33, 61, 65)
KVS = (0, 64, 256, 1024)
DEPLOYMENT = Deployment(device="cpu", device_name="A CPU of formulas", threads=2)
IDENTITY = DeviceIdentity(kind="cpu", name="A CPU of formulas", num_cores=2)


def formula_ms(block: Block, q: float, kv: float, dims: Dims) -> float:
    """Milliseconds of a block; distinct coefficients, so that a mixed-up term shows."""
    if block in ("target_step", "target_prefill"):
        return 5.0 + 0.002 * kv + 0.1 * (q - 1)
    if block == "verify":
        return 5.0 + 0.002 * kv + (0.1 if dims["mask"] == "chain" else 0.12) * (q - 1)
    if block == "draft_layer":
        width = int(dims["num_kv_heads"]) / 4 + int(dims["ffn"]) / 512
        first = 0.05 if dims["position"] == "first" else 0.0
        return 0.1 + first + 0.1 * width + 0.01 * q + 0.0003 * kv
    if block == "draft_sync":
        width = int(dims["num_kv_heads"]) / 4 + int(dims["ffn"]) / 512
        return 0.07 + (0.13 + 0.11 * width) * int(dims["depth"]) + 0.013 * q + 0.0002 * kv
    if block == "draft_fc":
        return 0.02 + 0.005 * q * int(dims["taps"])
    if block == "draft_head":
        cold = 0.02 if dims["kind"] == "sync" else 0.0
        return 0.03 + cold + int(dims["vocab"]) * (5e-5 + 1e-5 * q)
    if block == "draft_fixed":
        return 0.04 + 0.002 * q
    if block == "draft_prefill":
        return 0.5 + 0.01 * q * int(dims["depth"]) + 0.001 * int(dims["taps"])
    gather = 0.005 if dims["mask"] == "tree" and dims["part"] == "commit" else 0.0
    parts = {"tree": 0.011, "accept": 0.023, "commit": 0.037}
    return parts[str(dims["part"])] + gather + 0.001 * q


def build_table(
    space: SearchSpace | None = None,
    *,
    draft_scale: float = 1.0,
    qs: Sequence[int] = QS,
    kvs: Sequence[int] = KVS,
    deployment: Deployment = DEPLOYMENT,
) -> LatencyTable:
    """All blocks that the drafts of a space use; draft blocks cost `draft_scale` times as much."""
    entries = []
    for block, dims in _groups(space or SearchSpace()):
        is_single = block == "target_step" or (block == "draft_head" and dims["kind"] == "sync")
        rows = (1,) if is_single else (*qs, 512) if "prefill" in block else qs
        for q, kv in product(rows, kvs if SPECS[block].has_kv else (0,)):
            ms = formula_ms(block, q, kv, dims) * (draft_scale if "draft" in block else 1.0)
            entries.append(
                LatencyEntry(
                    block=block, q=q, kv=kv, dims=dims, median_ms=ms, p10_ms=ms, p90_ms=ms, n=9
                )
            )
    versions = package_versions()
    header = TableHeader(
        identity=IDENTITY,
        deployment=deployment,
        shape_hash="shape",
        torch=versions["torch"] or "none",
        transformers=versions["transformers"] or "none",
        date="2026-01-01",
        command="dreams-nas profile",
    )
    return LatencyTable(header=header, entries=tuple(entries))


def _groups(space: SearchSpace) -> Iterator[tuple[Block, Dims]]:
    yield "target_step", {}
    yield "target_prefill", {}
    for mask in ("chain", "tree"):
        yield "verify", {"mask": mask}
        for part in ("tree", "accept", "commit"):
            yield "host", {"part": part, "mask": mask}
    yield "draft_fixed", {}
    archs = space.enumerate(DIMS)
    sizes = [arch.sizes(DIMS) for arch in archs]
    for taps in sorted({len(size.target_layer_ids) for size in sizes}):
        yield "draft_fc", {"taps": taps}
    for vocab in sorted({size.vocab for size in sizes}):
        for kind in ("sync", "step"):
            yield "draft_head", {"vocab": vocab, "kind": kind}
    for heads, ffn in sorted({(size.num_kv_heads, size.ffn) for size in sizes}):
        for position in ("first", "next"):
            yield "draft_layer", {"num_kv_heads": heads, "ffn": ffn, "position": position}
    pairs = list(zip(archs, sizes, strict=True))
    for heads, ffn, depth in sorted({(s.num_kv_heads, s.ffn, a.depth) for a, s in pairs}):
        body: Dims = {"num_kv_heads": heads, "ffn": ffn, "depth": depth}
        yield "draft_sync", body
        for taps in sorted({len(size.target_layer_ids) for size in sizes}):
            yield "draft_prefill", {**body, "taps": taps}
