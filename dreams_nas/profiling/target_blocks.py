"""Points of the target and of the host: plain step, verification, prefill, tree, accept, commit.

Everything runs over one cache of real keys and values that a random prompt filled once; a point
sets its length back to the committed rows that it wants.

Shapes: Q verified rows, N nodes.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.decode.accept import accept_greedy
from dreams_nas.decode.adaptive import (
    AdaptivePlan,
    Economist,
    HostTree,
    VerifyTensors,
    to_device,
    to_host,
)
from dreams_nas.decode.costs import RoundCosts
from dreams_nas.decode.engine import build_plan
from dreams_nas.decode.plan import TreePlan
from dreams_nas.decode.stopping import cut_at_stop
from dreams_nas.profiling.forced import path_rows
from dreams_nas.profiling.grids import Grids, likely_tree
from dreams_nas.profiling.points import PointSet
from dreams_nas.profiling.random_drafts import RandomDrafts
from dreams_nas.space.policy import Calibration, DynamicTree, LevelCalibration
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.protocol import Target, TargetInputs

_NUM_STEPS_BEFORE = 5
"""Plain steps before a timed one. In a loop they get quicker until then: measured on two cores
(ms, a sweep's other points before the first) 2.71, 2.25, 1.97, 1.82, 1.72, 1.70, 1.68."""
_NUM_ROUNDS_BEFORE = 2
"""Rounds before a timed verification: it settles sooner (3.86, 3.57, 3.43, 3.41, 3.37)."""
_NUM_GUESSES = 3
"""Guesses that an adaptive policy looks at, typically."""
_NUM_LEVELS = 6
"""Levels of the trees that are verified: their mask costs the same, whatever it holds."""


class TargetBlocks:
    """Builds the points of the target; holds its cache."""

    def __init__(
        self, target: Target, drafts: RandomDrafts, grids: Grids, taps: Sequence[int]
    ) -> None:
        """Fill the cache.

        Args:
            target: What is measured.
            drafts: Source of random tokens.
            grids: Rows and committed rows.
            taps: Target layers that verification reads, as many as any draft of the space does.
        """
        self._target, self._drafts, self._grids = target, drafts, grids
        self._taps = tuple(taps)
        self.cache = target.build_cache(grids.max_kv + grids.max_rows)
        self.prompt = TargetInputs(drafts.tokens(grids.max_kv))
        target.prefill(self.prompt, self.cache)
        self._tokens_Q = drafts.tokens(grids.max_rows)
        self._plans: dict[StaticTree, TreePlan] = {}

    def plan(self, tree: StaticTree) -> TreePlan:
        """The tree's plan, built once."""
        if tree not in self._plans:
            plan = build_plan(tree, self._target)
            assert plan is not None, "a plan needs a node"
            self._plans[tree] = plan
        return self._plans[tree]

    def step(self, kv: int) -> Callable[[], object]:
        """One plain decoding step over kv rows, to its greedy token."""
        depth_1 = torch.zeros(1, dtype=torch.int64, device=self._target.device)
        root_1 = self._tokens_Q[:1]

        def run() -> None:
            self.cache.length = kv
            out = self._target.verify(root_1, depth_1, None, self.cache)
            self.cache.commit([0])
            out.logits_QV.argmax(dim=-1).tolist()

        return run

    def verify(self, tree: StaticTree, kv: int) -> Callable[[], Tensor]:
        """One verification over kv rows, to the greedy token after every row."""
        plan = self.plan(tree)
        tokens_Q = self._tokens_Q[: tree.num_nodes + 1]

        def run() -> Tensor:
            self.cache.length = kv
            out = self._target.verify(
                tokens_Q, plan.depths_Q, plan.mask_QQ, self.cache, target_layer_ids=self._taps
            )
            return out.logits_QV.argmax(dim=-1)

        return run

    def verify_root(self, kv: int) -> Callable[[], Tensor]:
        """The verification of a round that drafts nothing, to the greedy token."""
        depth_1 = torch.zeros(1, dtype=torch.int64, device=self._target.device)
        root_1 = self._tokens_Q[:1]

        def run() -> Tensor:
            self.cache.length = kv
            out = self._target.verify(
                root_1, depth_1, None, self.cache, target_layer_ids=self._taps
            )
            return out.logits_QV.argmax(dim=-1)

        return run

    def add_passes(self, points: PointSet, draft_act: Callable[[], object]) -> None:
        """Plain steps and verifications, each after others of its kind, as in decoding.

        Args:
            points: Collects them.
            draft_act: What the draft does between two verifications.
        """
        kvs = self._grids.kv_points
        for kv in kvs:
            step = self.step(kv)
            points.add("target_step", 1, kv, {}, step, repeated(_NUM_STEPS_BEFORE, step))
            if kv in (kvs[0], kvs[-1]):
                root = self.verify_root(kv)
                before = repeated(_NUM_ROUNDS_BEFORE, root, draft_act)
                points.add("verify", 1, kv, {"mask": "chain"}, root, before)
        ends = (kvs[0], kvs[-1])
        for mask, rows in (("tree", self._grids.verify_rows), ("chain", self._grids.chain_rows)):
            for q in rows:
                is_chain = mask == "chain"
                tree = StaticTree.chain(q - 1) if is_chain else likely_tree(_NUM_LEVELS, q - 1)
                for kv in kvs if q in (2, 8, 16, rows[-1]) else sorted(set(ends)):
                    run = self.verify(tree, kv)
                    before = repeated(_NUM_ROUNDS_BEFORE, run, draft_act)
                    points.add("verify", q, kv, {"mask": mask}, run, before)

    def add_host(self, points: PointSet) -> None:
        """The host's part of a round, with a path of two nodes accepted.

        What a chain accepts is a prefix of its rows; a tree's path mostly has to be gathered.
        """
        for q in self._grids.host_rows:
            self._add_host(points, likely_tree(_NUM_LEVELS, q - 1), "tree")
        for q in self._grids.chain_host_rows:
            self._add_host(points, StaticTree.chain(q - 1), "chain")
        self._add_decision(points)

    def _add_decision(self, points: PointSet) -> None:
        """What an adaptive policy adds: to a level of one row its probabilities and the rule, to a
        tree that is no chain the tensors it is verified with.
        """
        vocab = self._grids.vocabs[len(self._grids.vocabs) // 2]
        logits_1V = self._drafts.normal(1, vocab)
        level = LevelCalibration(
            log_probabilities=(-9.0, -1.0, 0.0), acceptance=(0.0, 0.5, 1.0), continuation=1.0
        )
        tree = DynamicTree(num_levels=2, width=min(_NUM_GUESSES, vocab), num_nodes=2)
        free = np.zeros(3)
        economist = Economist(
            AdaptivePlan(
                Calibration(tree=tree, levels=(level,), error=0, num_rounds=1, tokens_per_round=2),
                RoundCosts(0.0, free, 0.0, free + 1, free + 1),
            )
        )

        # The head's own block holds the ranking; probabilities and the transfer come on top.
        logs_WK, ids_WK = logits_1V.topk(tree.width, dim=-1)

        def decide() -> None:
            economist.open_round()
            logits_1V.float().log_softmax(dim=-1)
            economist.look(*to_host(ids_WK, logs_WK))

        points.add("host", 1, 0, {"part": "decide", "mask": "chain"}, decide, decide, every=2)
        tensors = VerifyTensors(self._grids.max_rows, self._target.dtype, self._target.device)
        for q in self._grids.host_rows:
            parents = [parent + 1 for parent in likely_tree(_NUM_LEVELS, q - 1).parents]
            grown = HostTree([0] * len(parents), parents)

            def build(grown: HostTree = grown) -> None:
                tensors.of(grown)

            points.add("host", q, 0, {"part": "decide", "mask": "tree"}, build, build, every=2)

    def _add_host(self, points: PointSet, tree: StaticTree, mask: str) -> None:
        plan, q = self.plan(tree), tree.num_nodes + 1
        verify = self.verify(tree, self._grids.mid_kv)
        tokens_Q = self._tokens_Q[:q]
        root_1, drafted_N = tokens_Q[:1], tokens_Q[1:]
        rows = path_rows(plan, min(2, tree.num_levels))
        chosen_Q = torch.full_like(tokens_Q, -1)
        chosen_Q[rows[:-1]] = tokens_Q[rows[1:]]
        num_features = max(1, len(self._taps)) * self._target.spec.dims.hidden
        features_QF = self._drafts.normal(q, num_features)

        def join() -> None:
            torch.cat([root_1, drafted_N])

        def accept() -> None:
            host = torch.cat([drafted_N, chosen_Q]).tolist()
            gained = accept_greedy(plan.children, host[: q - 1], host[q - 1 :])[1]
            cut_at_stop(gained, 0, q, frozenset())

        def commit() -> None:
            self.cache.commit(rows)
            if rows[-1] == len(rows) - 1:
                _ = chosen_Q[: len(rows)], features_QF[: len(rows)]
            else:
                index_A = to_device(rows, chosen_Q.device)
                _ = chosen_Q[index_A], features_QF[index_A]

        for part, run in (("tree", join), ("accept", accept), ("commit", commit)):
            points.add("host", q, 0, {"part": part, "mask": mask}, run, verify, every=2)

    def add_prefills(self, points: PointSet) -> None:
        """The target's prefill of real prompts, an image included where it takes one."""

        def clear() -> None:
            self.cache.length = 0

        prompts = _sample_prompts(self._target, self._grids.max_kv)
        for q, prompt in {len(p.input_ids_T): p for p in prompts}.items():

            def run(prompt: TargetInputs = prompt) -> None:
                self._target.prefill(prompt, self.cache, target_layer_ids=self._taps)

            points.add("target_prefill", q, 0, {}, run, clear, every=4)


def repeated(times: int, *acts: Callable[[], object]) -> Callable[[], None]:
    """One act after the other, over and over."""

    def run() -> None:
        for _ in range(times):
            for act in acts:
                act()

    return run


def _sample_prompts(target: Target, max_rows: int) -> list[TargetInputs]:
    """Prompts with a short and a long text; none where the target has no processor."""
    takes_images = bool(getattr(target, "takes_images", False))
    if getattr(target, "processor" if takes_images else "tokenizer", None) is None:
        return []
    from PIL import Image

    prompts = []
    for text in ("What is shown?", "What is shown? " * 8):
        content = [{"type": "image"}] * takes_images + [{"type": "text", "text": text}]
        images = [Image.new("RGB", (224, 224), "white")] * takes_images
        try:
            prompts.append(target.prepare([{"role": "user", "content": content}], images))
        except UserError:  # longer than the target's positions
            continue
    return [prompt for prompt in prompts if len(prompt.input_ids_T) <= max_rows]
