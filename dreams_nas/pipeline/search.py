"""The stage `search`: every draft of the space priced by replay and table, finalists decoded."""

from collections.abc import Sequence
from pathlib import Path

from dreams_nas.bench.arms import PLAIN, PLAIN_NAME, Arm
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.measure import run_bench
from dreams_nas.bench.stage import build_prompts
from dreams_nas.core.console import progress
from dreams_nas.core.files import hash_json
from dreams_nas.core.lock import machine_lock
from dreams_nas.core.provenance import provenance
from dreams_nas.features.conversations import Conversation
from dreams_nas.features.store import FeatureStore
from dreams_nas.latency.table import LatencyTable
from dreams_nas.pipeline.config import SearchConfig
from dreams_nas.pipeline.replayed import SupernetReplay
from dreams_nas.search.objective import Evaluation, TableObjective
from dreams_nas.search.result import SearchResult, save_result
from dreams_nas.search.searchers import ExhaustiveSearcher, Problem
from dreams_nas.search.study import Study, StudyIdentity
from dreams_nas.search.winner import choose_winner, decompose_lift
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import SearchSpace
from dreams_nas.supernet.checkpoint import SupernetConfig
from dreams_nas.supernet.supernet import Supernet
from dreams_nas.targets.huggingface import HuggingFaceTarget


class FinalistTimer:
    """Decodes finalists and plain decoding, interleaved, on some prompts."""

    def __init__(
        self,
        target: HuggingFaceTarget,
        supernet: Supernet,
        supernet_config: SupernetConfig,
        conversations: Sequence[Conversation],
        max_new_tokens: int,
        quiet: bool,
    ) -> None:
        self._target = target
        self._supernet = supernet
        self._config = supernet_config
        self._prompts = build_prompts(target, conversations)
        self._measure = MeasureConfig(max_new_tokens=max_new_tokens, num_passes=1, num_warmup=1)
        self._quiet = quiet

    def __call__(self, finalists: list[Evaluation]) -> list[float]:
        """Measured plain seconds / speculative seconds of each, over the same prompts."""
        arms = [PLAIN]
        for one in finalists:
            draft = self._supernet.extract(self._config.draft_config(one.arch))
            arms.append(Arm(one.arch.key, draft, one.tree))
        result = run_bench(self._target, arms, self._prompts, self._measure, quiet=self._quiet)
        seconds = {
            arm.name: sum(s.decode_s for s in result.samples if s.arm == arm.name) for arm in arms
        }
        return [seconds[PLAIN_NAME] / seconds[one.arch.key] for one in finalists]


def search(
    target: HuggingFaceTarget,
    supernet: Supernet,
    supernet_config: SupernetConfig,
    table: LatencyTable,
    space: SearchSpace,
    config: SearchConfig,
    *,
    choose: FeatureStore,
    score: FeatureStore,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    supernet_hash: str,
    out: Path,
    seed: int,
    quiet: bool = False,
) -> SearchResult:
    """Find the draft and the draft tree that decode fastest on the table's deployment.

    Evaluations are kept as they come: a killed search goes on where it stopped.

    Args:
        target: On the deployment that the table was measured on; the caller has checked that.
        supernet: Trained for this target and for every tap and depth of the space.
        supernet_config: Its configuration.
        table: Latencies.
        space: Drafts and policies.
        config: Finalists and limits.
        choose: Recorded answers that trees are chosen on.
        score: Recorded answers that drafts are scored on.
        conversations: Prompts of the *score* split that finalists decode.
        max_new_tokens: Longest answer of the finalists.
        supernet_hash: Hash of the supernet's artefact.
        out: Folder of study and result.
        seed: Root seed, recorded.
        quiet: No progress.

    Raises:
        UserError: A space that is too large, or a study of another space, table or supernet.
    """
    dims = target.spec.dims
    objective = TableObjective(
        table, dims, space.policy, SupernetReplay(supernet, target, space, choose, score)
    )
    identity = StudyIdentity(
        space=space.hash,
        table=table.hash,
        supernet=supernet_hash,
        objective=hash_json([choose.manifest.key_hash, score.manifest.key_hash]),
    )
    study = Study(identity, out)
    num_drafts = len(space.enumerate(dims))
    with progress("searching", num_drafts - study.num_completed, quiet) as bar:
        evaluations = ExhaustiveSearcher(config.max_drafts).search(
            Problem(space, dims, objective), study, lambda *_: bar.advance()
        )
    answered = set(score.manifest.ids)  # prompts too long for the target have no answer
    timer = FinalistTimer(
        target,
        supernet,
        supernet_config,
        [c for c in conversations if c.id in answered][: config.num_prompts],
        max_new_tokens,
        quiet,
    )
    with machine_lock("search", quiet=quiet):
        choice = choose_winner(evaluations, timer, config.num_finalists)
    lift = []
    if choice.winner is not None:
        chains = space.policy.replace(kind="chain", nodes=(1, space.policy.levels[1]))

        def evaluate_chain(arch: DraftArch) -> Evaluation:
            return objective.evaluate(arch, chains)

        lift = decompose_lift(
            choice.winner,
            space,
            dims,
            objective,
            evaluate_chain=evaluate_chain,
            known={e.arch.key: e for e in evaluations},
        )
    result = SearchResult(
        identity=identity,
        evaluations=tuple(evaluations),
        choice=choice,
        lift=tuple(lift),
        provenance=provenance(
            "search", config, seed, {"table": table.hash, "supernet": supernet_hash}
        ),
    )
    save_result(result, out)
    return result
