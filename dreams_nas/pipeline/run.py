"""A whole run: from a target and a machine to a measured, lossless, exported draft."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dreams_nas.bench.arms import BASELINE_NAME, PLAIN, WINNER_NAME, Arm, load_arm
from dreams_nas.bench.config import MeasureConfig
from dreams_nas.bench.measure import Prompt
from dreams_nas.bench.report import write_report
from dreams_nas.bench.stage import bench_arms, build_prompts, require_room
from dreams_nas.bench.statistics import Quantiles
from dreams_nas.bench.summary import save_bench
from dreams_nas.core.config import save_config
from dreams_nas.core.device import identify_device
from dreams_nas.core.files import file_hash, hash_json, read_json
from dreams_nas.core.lock import machine_lock
from dreams_nas.core.provenance import package_versions, provenance
from dreams_nas.distill.finetune import build_draft
from dreams_nas.distill.recipes import NAMED_RECIPES, Recipe
from dreams_nas.distill.supernet_training import train_supernet
from dreams_nas.draft.model import load_draft
from dreams_nas.export.own import read_bench, save_export
from dreams_nas.features.collect import collect
from dreams_nas.features.config import CollectConfig
from dreams_nas.features.store import load_features
from dreams_nas.features.vocabulary import vocabulary_order
from dreams_nas.latency.table import load_table, save_table
from dreams_nas.pipeline.checks import COLLECTED_SPLITS, check_run
from dreams_nas.pipeline.config import RunConfig
from dreams_nas.pipeline.context import RunContext
from dreams_nas.pipeline.finetune import finetune, load_evaluation, load_published_tree
from dreams_nas.pipeline.replayed import as_deployed
from dreams_nas.pipeline.run_folder import RunFolder, Stage, remove_artefact
from dreams_nas.pipeline.search import search
from dreams_nas.profiling.config import ProfileConfig
from dreams_nas.profiling.profile import profile
from dreams_nas.search.result import SearchResult, load_result
from dreams_nas.space.arch import NAMED_ARCHS, DraftArch
from dreams_nas.targets.loading import target_fingerprint

PUBLISHED_TREE_NAME = "eagle3_published_tree"
"""The arm of the baseline with the best static tree of the published size."""


def run(config: RunConfig, *, quiet: bool = False, force: bool = False) -> dict[str, Any]:
    """Do every stage that is not done yet.

    Args:
        config: The whole run.
        quiet: No progress.
        force: Redo finished stages, too.

    Returns:
        The bench's summary, with the seconds of every stage of the run.

    Raises:
        UserError: Something in the configuration or the data is wrong; most of it is found before
            the target is loaded.
        RunError: A stage failed.
    """
    context = RunContext(config, quiet)
    stages = _Stages(context)
    check_run(context)
    with machine_lock("run", quiet=quiet):
        save_config(config, context.path("config.yaml"))
        folder = RunFolder(context.folder, quiet)
        folder.run(stages.until_search(), force=force)
        result = load_result(context.path("search"))
        if result.winner is None:
            stages.forget_drafts(folder)
        folder.run(stages.after_search(result), force=force)
    line: dict[str, Any] = read_json(context.path("bench") / "bench.json")["summary"]
    seconds = folder.seconds_by_stage
    return {**line, "seconds_by_stage": seconds, "seconds_total": sum(seconds.values())}


class _Stages:
    """Builds the stages of a run; each reads artefacts from the run folder and writes its own."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._config = context.run

    def forget_drafts(self, folder: RunFolder) -> None:
        """Delete what an earlier run, with a winner, has left."""
        folder.forget(("finetune", "baseline", "export"))
        for name in ("draft", "baseline", "export"):
            remove_artefact(self._context.path(name))

    def until_search(self) -> list[Stage]:
        """What is done whatever the answer of the search."""
        context, config = self._context, self._config
        target = [target_fingerprint(config.target), config.dtype, config.attention]
        collects = [
            self._stage(
                f"collect-{split}",
                lambda split=split: self._collect(split),  # type: ignore[misc]
                output=f"features/{split}",
                settings=[
                    target,
                    context.data_hash(split),
                    config.data.max_new_tokens,
                    context.space.tap,
                ],
                hash_output=lambda path: load_features(path).key_hash,
            )
            for split in COLLECTED_SPLITS
        ]
        return [
            *collects,
            self._stage(
                "profile",
                self._profile,
                output="table.json",
                inputs=tuple(stage.name for stage in collects),
                settings=[
                    target,
                    context.deployment,
                    identify_device(context.device).num_cores,
                    package_versions(),
                    context.space.hash,
                    context.data_hash("test"),
                    config.data.max_new_tokens,
                    config.profile_budget_s,
                    config.max_kv,
                    config.table and file_hash(config.table),
                ],
                hash_output=lambda path: load_table(path).hash,
            ),
            self._stage(
                "train",
                self._train,
                output="supernet",
                inputs=("collect-train",),
                settings=[target, config.train, context.space.hash, config.seed],
            ),
            self._stage(
                "search",
                self._search,
                output="search",
                inputs=("collect-choose", "collect-score", "profile", "train"),
                settings=[config.search, context.space.hash, config.data.max_new_tokens],
            ),
        ]

    def after_search(self, result: SearchResult) -> list[Stage]:
        """Fine-tuning, bench, export and report; without a winner, bench and report alone."""
        config = self._config
        drafts: list[Stage] = []
        if result.winner is not None:
            settings = [config.finetune, self._context.space.policy, config.seed]
            read = ("collect-train", "collect-choose", "collect-score", "profile", "train")
            drafts.append(
                self._stage(
                    "finetune",
                    lambda: self._finetune(result),
                    output="draft",
                    inputs=(*read, "search"),
                    settings=settings,
                )
            )
            if config.baseline.kind != "none":
                drafts.append(
                    self._stage(
                        "baseline",
                        self._baseline,
                        output="baseline",
                        inputs=read,
                        settings=[*settings, config.baseline, config.train],
                    )
                )
        names = tuple(stage.name for stage in drafts)
        tail = [
            self._stage(
                "bench",
                lambda: self._bench(has_winner=bool(drafts)),
                output="bench",
                inputs=(*names, "profile", "search"),
                settings=[
                    self._context.data_hash("test"),
                    config.data.max_new_tokens,
                    config.num_passes,
                ],
            )
        ]
        if drafts:
            tail.append(
                self._stage("export", self._export, output="export", inputs=("finetune", "bench"))
            )
        tail.append(
            self._stage(
                "report",
                self._report,
                output="report",
                inputs=("profile", "search", "bench"),
            )
        )
        return [*drafts, *tail]

    def _stage(
        self,
        name: str,
        run_stage: Callable[[], None],
        *,
        output: str,
        inputs: tuple[str, ...] = (),
        settings: Any = None,
        hash_output: Callable[[Path], str] = file_hash,
    ) -> Stage:
        path = self._context.path(output)
        return Stage(name, hash_json(settings), inputs, path, run_stage, hash_output)

    def _collect(self, split: str) -> None:
        context, config = self._context, self._config
        settings = CollectConfig(
            taps=context.space.tap,
            max_new_tokens=config.data.max_new_tokens,
            batch_tokens=config.batch_tokens,
        )
        collect(
            context.target,
            context.conversations(split),
            settings,
            context.path(f"features/{split}"),
            split=split,
            seed=config.seed,
            overwrite=True,
            quiet=context.quiet,
        )

    def _profile(self) -> None:
        context, config = self._context, self._config
        prompts = build_prompts(context.target, context.conversations("test"))
        require_room(context.target, prompts, config.data.max_new_tokens)
        if config.table is not None:
            save_table(context.load_table(Path(config.table)), context.path("table.json"))
            return
        settings = ProfileConfig(
            target=config.target,
            space=config.space,
            device=context.device,
            dtype=config.dtype,
            attention=config.attention,
            threads=context.threads,
            seed=context.seed("profile"),
            max_kv=config.max_kv or self._longest(prompts),
            budget_s=config.profile_budget_s,
        )
        table = profile(context.target, context.space, settings, quiet=context.quiet)
        save_table(table, context.path("table.json"))

    def _longest(self, prompts: Sequence[Prompt]) -> int:
        """Rows of the longest prompt of all splits with its longest answer."""
        lengths = [len(prompt.inputs.input_ids_T) for prompt in prompts]
        for split in COLLECTED_SPLITS:
            lengths += [entry.prompt_length for entry in self._context.store(split).entries]
        return max(lengths) + self._config.data.max_new_tokens

    def _train(self) -> None:
        context = self._context
        store = context.store("train")
        spec = context.target.spec
        order_V = vocabulary_order(store, spec.dims.vocab, spec.eos_token_ids)
        train_supernet(
            context.space,
            store,
            context.target,
            order_V,
            self._config.train,
            seed=context.seed("train"),
            folder=context.path("supernet"),
            data_hash=store.manifest.key_hash,
            quiet=context.quiet,
        )

    def _search(self) -> None:
        context, config = self._context, self._config
        supernet, described = context.supernet
        search(
            context.target,
            as_deployed(supernet, context.target.dtype),
            described,
            context.table,
            context.space,
            config.search,
            choose=context.store("choose"),
            score=context.store("score"),
            conversations=context.conversations("score"),
            max_new_tokens=config.data.max_new_tokens,
            supernet_hash=RunFolder(context.folder).state.stages["train"].output,
            out=context.path("search"),
            seed=config.seed,
            quiet=context.quiet,
        )

    def _finetune(self, result: SearchResult) -> None:
        assert result.winner is not None, "there is no winner to fine-tune"
        self._finetune_subnet(result.winner.arch, "draft")

    def _finetune_subnet(self, arch: DraftArch, output: str) -> None:
        """The winner and the supernet's baseline: same recipe, same seconds, same order."""
        context, config = self._context, self._config
        supernet, described = context.supernet
        draft = supernet.extract(described.draft_config(arch)).float()
        finetune(
            draft,
            context.target,
            context.splits,
            context.table,
            context.space.policy,
            config.finetune,
            folder=context.path(output),
            seed=context.seed("finetune"),
            quiet=context.quiet,
        )

    def _baseline(self) -> None:
        arch, baseline = NAMED_ARCHS[BASELINE_NAME], self._config.baseline
        if baseline.kind == "supernet":
            self._finetune_subnet(arch, "baseline")
            return
        context = self._context
        supernet, _ = context.supernet
        finetune(
            build_draft(arch, context.target, supernet.vocab_order_V, context.seed("baseline")),
            context.target,
            context.splits,
            context.table,
            context.space.policy,
            self._baseline_recipe(),
            folder=context.path("baseline"),
            seed=context.seed("baseline"),
            published_size=(baseline.num_levels, baseline.num_nodes),
            quiet=context.quiet,
        )

    def _baseline_recipe(self) -> Recipe:
        """Its own recipe, for the budget that supernet and winner had together."""
        recipe, parts = (
            NAMED_RECIPES[BASELINE_NAME],
            (
                self._config.train.recipe,
                self._config.finetune,
            ),
        )
        seconds = [part.max_seconds for part in parts if part.max_seconds is not None]
        steps = [part.num_steps for part in parts if part.num_steps is not None]
        return recipe.replace(
            max_seconds=sum(seconds) if len(seconds) == 2 else None,
            num_steps=sum(steps) if len(steps) == 2 else None,
            lr=self._config.finetune.lr,
            batch_tokens=self._config.finetune.batch_tokens,
        )

    def _bench(self, has_winner: bool) -> None:
        context, config = self._context, self._config
        target = context.target
        arms, predicted = [PLAIN], {}
        if has_winner:
            arms.append(load_arm(WINNER_NAME, context.path("draft"), target))
            predicted[WINNER_NAME] = self._predicted("draft")
            if config.baseline.kind != "none":
                arms.append(load_arm(BASELINE_NAME, context.path("baseline"), target))
                predicted[BASELINE_NAME] = self._predicted("baseline")
            if config.baseline.kind == "alone":
                tree = load_published_tree(context.path("baseline"))
                arms.append(Arm(PUBLISHED_TREE_NAME, arms[-1].draft, tree))
        report = bench_arms(
            target,
            arms,
            build_prompts(target, context.conversations("test")),
            MeasureConfig(max_new_tokens=config.data.max_new_tokens, num_passes=config.num_passes),
            table=context.table,
            predicted=predicted,
            deployment=context.deployment,
            quiet=context.quiet,
        )
        record = provenance("bench", config, config.seed, {"table": context.table.hash})
        save_bench(report, context.path("bench"), record)

    def _predicted(self, folder: str) -> Quantiles:
        summary = load_evaluation(self._context.path(folder)).speedup_predicted
        return Quantiles(median=summary.median, p10=summary.p10, p90=summary.p90)

    def _export(self) -> None:
        context = self._context
        bench = context.path("bench") / "bench.json"
        draft = load_draft(context.path("draft"))
        inputs: dict[str, Path | str] = {"draft": context.path("draft"), "bench": bench}
        origin = provenance("export", self._config, self._config.seed, inputs, context.deployment)
        save_export(draft, context.path("export"), origin, read_bench(bench))

    def _report(self) -> None:
        write_report(self._context.folder, self._context.path("report"))
