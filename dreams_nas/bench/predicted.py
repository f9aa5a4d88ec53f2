"""What the latency table says the rounds of a bench should have cost."""

from collections.abc import Sequence

import numpy as np
import torch

from dreams_nas.bench.arms import Arm
from dreams_nas.bench.measure import BenchResult
from dreams_nas.bench.statistics import Quantiles
from dreams_nas.core.console import warn
from dreams_nas.core.errors import UserError
from dreams_nas.draft.visual import kept_rows
from dreams_nas.latency.cost import CostModel
from dreams_nas.latency.predict import predict_speedup
from dreams_nas.latency.table import LatencyTable
from dreams_nas.space.walks import Walk
from dreams_nas.targets.protocol import TargetInputs


def recorded_walk(result: BenchResult, arm: Arm) -> Walk:
    """The rounds that an arm took on the bench's prompts."""
    keep_ratio = arm.draft.config.arch.keep_ratio if arm.draft is not None else 1.0
    prompts: list[int] = []
    roots: list[int] = []
    accepted: list[int] = []
    samples = [result.first(arm.name, index) for index in range(len(result.prompts))]
    for sample in samples:
        root = 0
        for count in sample.accepted:
            prompts.append(sample.prompt)
            roots.append(root)
            accepted.append(count)
            root += count + 1
    inputs = [prompt.inputs for prompt in result.prompts]
    return Walk(
        prompt_N=np.array(prompts, dtype=np.int64),
        root_N=np.array(roots, dtype=np.int64),
        accepted_N=np.array(accepted, dtype=np.int64),
        answer_lengths_P=np.array([len(sample.tokens) for sample in samples], dtype=np.int64),
        prompt_lengths_P=np.array([len(i.input_ids_T) for i in inputs], dtype=np.int64),
        kept_rows_P=np.array([_num_kept_rows(i, keep_ratio) for i in inputs], dtype=np.int64),
    )


def _num_kept_rows(inputs: TargetInputs, keep_ratio: float) -> int:
    """Draft rows of a prompt; how many does not depend on which image tokens are important."""
    length = len(inputs.input_ids_T)
    return len(kept_rows(length, inputs.image_spans, keep_ratio, torch.zeros(length)))


def predict_arms(
    result: BenchResult, table: LatencyTable, names: Sequence[str]
) -> dict[str, Quantiles | None]:
    """Price the recorded rounds of some arms; None, with a warning, where the table cannot.

    Args:
        result: The bench; its clock is not read.
        table: Of the same deployment and target shape.
        names: Speculative arms.
    """
    predicted: dict[str, Quantiles | None] = {}
    for name in names:
        arm = result.arm(name)
        assert arm is not None, f"no arm '{name}'"
        assert arm.draft is not None, f"arm '{name}' drafts nothing"
        config = arm.draft.config
        try:
            costs = CostModel(table, config.arch, config.target_dims)
            summary = predict_speedup(costs, arm.tree, recorded_walk(result, arm)).summary
        except UserError as error:
            warn(f"arm '{name}' is not priced: {error}")
            predicted[name] = None
            continue
        predicted[name] = Quantiles(median=summary.median, p10=summary.p10, p90=summary.p90)
    return predicted
