"""`dreams-nas demo`: the whole run on the embedded target, at three lengths."""

from typing import Literal

from dreams_nas.distill.recipes import Recipe, SupernetTrainingConfig
from dreams_nas.pipeline.config import BaselineConfig, DataConfig, RunConfig, SearchConfig

Length = Literal["demo", "quick", "full"]


def demo_config(
    length: Length, *, out: str, threads: int | None = None, seed: int = 0
) -> RunConfig:
    """The run of a demo.

    Args:
        length: `demo` takes about ten minutes on two cores; `quick` shrinks steps and prompts only
            and belongs to the tests: its draft is not worth its name; `full` trains longer and
            trains the baseline alone by its own recipe.
        out: Run folder.
        threads: CPU threads of one operation; None takes all cores.
        seed: Root seed.
    """
    config = RunConfig(
        out=out,
        threads=threads,
        seed=seed,
        data=DataConfig(num_train=900, num_choose=80, num_score=60),
        train=SupernetTrainingConfig(recipe=Recipe(max_seconds=120)),
        finetune=Recipe(max_seconds=70),
    )
    if length == "quick":
        return config.replace(
            data=DataConfig(num_train=24, num_choose=8, num_score=8, num_test=4, max_new_tokens=48),
            profile_budget_s=12.0,
            train=SupernetTrainingConfig(recipe=Recipe(num_steps=12), num_calibration_batches=2),
            search=SearchConfig(num_finalists=2, num_prompts=3),
            finetune=Recipe(num_steps=8),
            num_passes=1,
        )
    if length == "full":
        return config.replace(
            data=DataConfig(num_train=1600),
            train=SupernetTrainingConfig(recipe=Recipe(max_seconds=420)),
            finetune=Recipe(max_seconds=240),
            baseline=BaselineConfig(kind="alone"),
        )
    return config
