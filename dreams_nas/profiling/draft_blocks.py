"""Points of the draft: sync, fusion, layers, head, the rest of a step, prefill.

Where a part cannot be timed alone, two whole passes are timed and the entry is their difference: a
further layer is the slope between one layer and three; a sync is what `DraftSession` takes less the
fusion; the rest of a step is what it takes besides layers and head, averaged over the smallest and
the largest draft of the space. So the blocks add up to the passes that decoding makes, whatever the
seams cost.

What is in the processor's caches belongs to a pass: a self-fed step comes right after another draft
pass and finds the draft's weights there; a sync, its fusion and the head of level 1 come after the
target has swept them out. Points are prepared accordingly, and so a sync is measured apart from the
steps, for every size and depth: its last layer, which answers for one row only, is in there.

Shapes: Q rows of the pass, D hidden, F tapped features.
"""

from collections.abc import Callable

from torch.nn import functional as F

from dreams_nas.decode.drafting import ReadyDraft
from dreams_nas.draft.cache import DraftCache
from dreams_nas.draft.layers import Rotary, forward_rows, fuse, head
from dreams_nas.draft.weights import DraftWeights
from dreams_nas.latency.blocks import Dims
from dreams_nas.profiling.draft_passes import DraftPasses
from dreams_nas.profiling.grids import Grids, even_tree
from dreams_nas.profiling.points import PointSet, Terms, add_terms
from dreams_nas.profiling.random_drafts import SLOPE_DEPTH, RandomDrafts
from dreams_nas.profiling.timers import Point
from dreams_nas.space.arch import DraftArch
from dreams_nas.targets.protocol import Target

_NUM_RANKS = 4
"""Best guesses per row, one number for all: the table has no dimension for it."""
_NUM_REST_STEPS = 4
"""Steps that what is left of one is taken from."""


class DraftBlocks:
    """Builds the points of all drafts of a space."""

    def __init__(
        self, target: Target, drafts: RandomDrafts, passes: DraftPasses, grids: Grids
    ) -> None:
        """Remember what the points are made of."""
        self._target, self._drafts, self._passes, self._grids = target, drafts, passes, grids
        self._hidden = target.spec.dims.hidden

    def add_layers(self, points: PointSet) -> None:
        """`draft_layer`: the first one alone, a further one as a slope."""
        has_next = self._grids.depths[-1] > 1
        for num_kv_heads, ffn in self._grids.layer_sizes:
            size: Dims = {"num_kv_heads": num_kv_heads, "ffn": ffn}
            caches = {
                depth: self._cache(num_kv_heads, ffn, depth)
                for depth in ((1, SLOPE_DEPTH) if has_next else (1,))
            }
            for q in self._grids.step_rows:
                for kv in self._grids.draft_kv_points(q):
                    keys = {
                        depth: self._add_layer_pass(points, weights, cache, q, kv, size)
                        for depth, (weights, cache) in caches.items()
                    }
                    dims: Dims = {**size, "position": "first"}
                    points.add_entry("draft_layer", q, kv, dims, {keys[1]: 1.0})
                    if has_next:
                        share = 1.0 / (SLOPE_DEPTH - 1)
                        slope = {keys[SLOPE_DEPTH]: share, keys[1]: -share}
                        dims = {**size, "position": "next"}
                        points.add_entry("draft_layer", q, kv, dims, slope)

    def _cache(self, num_kv_heads: int, ffn: int, depth: int) -> tuple[DraftWeights, DraftCache]:
        weights = self._drafts.weights(num_kv_heads, ffn, depth, num_taps=1, vocab=1)
        return weights, DraftCache(weights, self._grids.max_draft_kv + self._grids.step_rows[-1])

    def _add_layer_pass(
        self,
        points: PointSet,
        weights: DraftWeights,
        cache: DraftCache,
        q: int,
        kv: int,
        size: Dims,
    ) -> str:
        embeddings_1QD = self._drafts.normal(1, q, self._hidden)
        states_1QD = self._drafts.normal(1, q, self._hidden)
        rotary = Rotary(self._drafts.rotary.cos[:q], self._drafts.rotary.sin[:q])
        mask = None if q == 1 else F.pad(self._drafts.normal(q, q).mul_(0), (kv, 0))

        def run() -> None:
            cache.length = kv
            cache.rewind()
            cache.open(q)
            forward_rows(weights, embeddings_1QD, states_1QD, rotary, cache, mask)

        name = ",".join(f"{key}={value}" for key, value in size.items())
        key = f"{len(weights.layers)} draft layers({name}) q={q} kv={kv}"
        return points.add_point(Point(key, run, run))

    def add_heads(self, points: PointSet, disturb: Callable[[], object]) -> None:
        """`draft_head`: norm, head, top-k and the ids in the target's vocabulary.

        That of level 1 is all that `DraftSession` does between a sync and the first step.
        """
        for vocab in self._grids.vocabs:
            num_kv_heads, ffn = self._grids.layer_sizes[0]
            weights = self._drafts.weights(num_kv_heads, ffn, 1, num_taps=1, vocab=vocab)
            for q in self._grids.step_rows:
                run = self._guess(weights, vocab, q)
                points.add("draft_head", q, 0, {"vocab": vocab, "kind": "step"}, run, run)
            ids_W = self._drafts.vocab_ids(vocab)
            draft = ReadyDraft(weights, ids_W, (0,), 1.0, self._drafts.rotary)
            level_1 = even_tree(min(_NUM_RANKS, vocab), 0)
            one = self._passes.sync_and_propose(draft, level_1, 0, disturb)
            points.add(
                "draft_head", 1, 0, {"vocab": vocab, "kind": "sync"}, one.run, one.prepare, every=2
            )

    def _guess(self, weights: DraftWeights, vocab: int, q: int) -> Callable[[], object]:
        states_QD, ids_W = self._drafts.normal(q, self._hidden), self._drafts.vocab_ids(vocab)
        num_ranks = min(_NUM_RANKS, vocab)

        def run() -> object:
            return ids_W[head(weights, states_QD).topk(num_ranks, dim=-1).indices.flatten()]

        return run

    def add_fusion(self, points: PointSet, disturb: Callable[[], object]) -> None:
        """`draft_fc`: only a sync fuses, so the weights are cold."""
        for taps in self._grids.taps:
            num_kv_heads, ffn = self._grids.layer_sizes[0]
            weights = self._drafts.weights(num_kv_heads, ffn, 1, num_taps=taps, vocab=1)
            for q in self._grids.sync_rows:
                features_QF = self._drafts.normal(q, taps * self._hidden)

                def run(weights: DraftWeights = weights, features_QF: object = features_QF) -> None:
                    fuse(weights, features_QF)  # type: ignore[arg-type]

                points.add("draft_fc", q, 0, {"taps": taps}, run, disturb, every=3)

    def add_syncs(self, points: PointSet, disturb: Callable[[], object]) -> None:
        """`draft_sync`: what `DraftSession` takes to commit rows, less their fusion.

        Needs the fusion to have been added. A sync finds what the round before committed, which is
        never more than the target's rows.
        """
        for num_kv_heads, ffn in self._grids.layer_sizes:
            for depth in self._grids.depths:
                dims: Dims = {"num_kv_heads": num_kv_heads, "ffn": ffn, "depth": depth}
                self._add_syncs_of(
                    points, dims, self._taps_draft(num_kv_heads, ffn, depth), disturb
                )

    def _add_syncs_of(
        self, points: PointSet, dims: Dims, draft: ReadyDraft, disturb: Callable[[], object]
    ) -> None:
        num_taps, name = len(draft.target_layer_ids), _describe(draft)
        session = self._passes.prefill(draft, self._grids.max_kv)()
        for q in self._grids.sync_rows:
            fusion = points.terms_at("draft_fc", {"taps": num_taps}, q)
            for kv in self._grids.sync_kv_points:
                one = self._passes.sync(session, num_taps, q, kv, disturb)
                key = points.add_point(
                    Point(f"sync of {name} q={q} kv={kv}", one.run, one.prepare, every=2)
                )
                terms = add_terms((1.0, {key: 1.0}), (-1.0, fusion))
                points.add_entry("draft_sync", q, kv, dims, terms)

    def _taps_draft(
        self, num_kv_heads: int, ffn: int, depth: int, taps: int | None = None
    ) -> ReadyDraft:
        """A draft without a head; by default with the fewest taps."""
        taps = self._grids.taps[0] if taps is None else taps
        weights = self._drafts.weights(num_kv_heads, ffn, depth, num_taps=taps, vocab=1)
        layer_ids = tuple(range(taps))  # how many matters here, not which
        return ReadyDraft(weights, None, layer_ids, 1.0, self._drafts.rotary)

    def add_rest(self, points: PointSet, references: list[DraftArch]) -> None:
        """`draft_fixed`: steps of the reference drafts without their layers and head.

        Needs layers and heads to have been added.

        Args:
            points: Collects them; holds the other blocks.
            references: Drafts over which the rest is averaged.
        """
        share = 1.0 / len(references)
        ready = [self._drafts.ready(arch) for arch in references]
        for q in self._grids.rest_rows:
            rest = [self._step_rest(points, one, q) for one in ready]
            terms = add_terms(*((share, terms) for terms in rest))
            points.add_entry("draft_fixed", q, 0, {}, terms)

    def _step_rest(self, points: PointSet, draft: ReadyDraft, q: int) -> Terms:
        """A step among several in a row, without its layers and head.

        Several, because a difference of two passes is as noisy as both: with one step, two profiles
        of one machine said 0.002 and 0.18 ms of the same draft, whose step takes 0.17.
        """
        num_ranks = min(_NUM_RANKS, len(draft.weights.head_VD))
        one_level, all_levels = even_tree(q, 0), even_tree(q, _NUM_REST_STEPS, num_ranks)
        with_steps = self._passes.sync_and_propose(draft, all_levels, 0, None)
        without = self._passes.sync_and_propose(draft, one_level, 0, None)
        name = f"of {_describe(draft)} w={q}"
        many = points.add_point(
            Point(f"{_NUM_REST_STEPS} steps {name}", with_steps.run, with_steps.prepare)
        )
        none = points.add_point(Point(f"no step {name}", without.run, without.prepare))
        share, kv, most = 1.0 / _NUM_REST_STEPS, self._passes.kv, self._grids.max_kv
        layers = [  # each step finds the rows of those before it, too
            self._layer_terms(points, draft, q, min(kv + step * q, most))
            for step in range(_NUM_REST_STEPS)
        ]
        return add_terms(
            (share, {many: 1.0, none: -1.0}),
            *((-share, terms) for terms in layers),
            (-1.0, _head_terms(points, draft, q)),
        )

    def _layer_terms(self, points: PointSet, draft: ReadyDraft, q: int, kv: int) -> Terms:
        weights = draft.weights
        layer = weights.layers[0]
        size: Dims = {
            "num_kv_heads": layer.k.shape[0] // weights.head_size,
            "ffn": layer.gate.shape[0],
        }
        first = points.terms_at("draft_layer", {**size, "position": "first"}, q, kv)
        if len(weights.layers) == 1:
            return first
        following = points.terms_at("draft_layer", {**size, "position": "next"}, q, kv)
        return add_terms((1.0, first), (float(len(weights.layers) - 1), following))

    def add_prefills(self, points: PointSet, disturb: Callable[[], object]) -> None:
        """`draft_prefill`: a new session commits a prompt; once per prompt, so rarely measured."""
        for num_kv_heads, ffn in self._grids.layer_sizes:
            for depth in self._grids.depths:
                for taps in self._grids.taps:
                    draft = self._taps_draft(num_kv_heads, ffn, depth, taps)
                    dims: Dims = {
                        "num_kv_heads": num_kv_heads,
                        "ffn": ffn,
                        "depth": depth,
                        "taps": taps,
                    }
                    for q in self._grids.prefill_rows:
                        run = self._passes.prefill(draft, q)
                        points.add("draft_prefill", q, 0, dims, run, disturb, every=6)


def _head_terms(points: PointSet, draft: ReadyDraft, q: int) -> Terms:
    dims: Dims = {"vocab": len(draft.weights.head_VD), "kind": "step"}
    return points.terms_at("draft_head", dims, q)


def _describe(draft: ReadyDraft) -> str:
    weights = draft.weights
    return (
        f"draft(depth={len(weights.layers)},heads={weights.layers[0].q.shape[0]},"
        f"ffn={weights.layers[0].gate.shape[0]},taps={len(draft.target_layer_ids)},"
        f"vocab={len(weights.head_VD)})"
    )
