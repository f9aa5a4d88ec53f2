"""Calibrating a draft: how often the target accepts a path, given how likely the draft holds it.

Shapes: X observed paths of one length.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dreams_nas.bench.config import CalibrateConfig
from dreams_nas.bench.measure import Prompt
from dreams_nas.bench.stage import build_prompts, require_room
from dreams_nas.core.config import build_config
from dreams_nas.core.console import progress, warn
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import write_json
from dreams_nas.core.seeds import derive_seed
from dreams_nas.decode.drafting import ready_draft
from dreams_nas.decode.dynamic import DynamicPlan
from dreams_nas.decode.engine import DecodeResult, Round, decode
from dreams_nas.decode.loading import require_draft_folder
from dreams_nas.draft.checkpoint import CONFIG_FILE
from dreams_nas.draft.model import DraftModel, load_draft
from dreams_nas.features.conversations import load_conversations
from dreams_nas.latency.grid import FloatArray
from dreams_nas.latency.monotone import rising_fit
from dreams_nas.space.policy import Calibration, DynamicTree, LevelCalibration
from dreams_nas.targets.loading import load_placed
from dreams_nas.targets.protocol import Target

_NUM_BINS = 24
_HELD_OUT = 3
"""Every third prompt is not fitted; the error is measured on those."""


class LevelPaths:
    """Paths of one length that were drafted and whose right continuation is known."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.accepted: list[bool] = []
        self.num_followed = 0
        """Accepted ones from which more was drafted."""
        self.num_going_on = 0
        """Those of which the next token was among it."""

    @property
    def num_accepted(self) -> int:
        """Accepted ones."""
        return sum(self.accepted)


def gather(
    target: Target,
    draft: DraftModel,
    tree: DynamicTree,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    quiet: bool = False,
) -> list[DecodeResult]:
    """Decode prompts token by token, a dynamic tree drafted from every place of the answers."""
    plan = DynamicPlan(tree, wants_scores=True, commits_one=True)
    ready = ready_draft(draft, target)
    found = []
    with progress("decoding for calibration", len(prompts), quiet) as bar:
        for prompt in prompts:
            found.append(
                decode(target, prompt.inputs, max_new_tokens=max_new_tokens, draft=ready, plan=plan)
            )
            bar.advance()
    return found


def by_level(results: Sequence[DecodeResult], num_levels: int) -> list[LevelPaths]:
    """Sort the paths drafted from every place of some answers by their length.

    Round k stands at token k of its answer. Paths beyond the answer's end are left out: nobody
    knows what is right there.
    """
    levels = [LevelPaths() for _ in range(num_levels)]
    for result in results:
        for place, done in enumerate(result.rounds):
            _sort_round(levels, done, result.tokens[place + 1 :])
    return levels


def _sort_round(levels: Sequence[LevelPaths], done: Round, right: Sequence[int]) -> None:
    """Add the paths of one round; `right` are the tokens that follow its root."""
    assert done.parents is not None
    assert done.scores is not None
    depths: list[int] = []
    accepted: list[bool] = []
    followed: set[int] = set()
    for node, parent in enumerate(done.parents):
        depth = 0 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        accepted.append(False)
        if depth >= len(right):
            continue
        is_above = parent < 0 or accepted[parent]
        accepted[node] = is_above and done.drafted[node] == right[depth]
        levels[depth].scores.append(done.scores[node])
        levels[depth].accepted.append(accepted[node])
        if is_above and parent >= 0:
            levels[depth - 1].num_followed += parent not in followed
            levels[depth - 1].num_going_on += accepted[node]
            followed.add(parent)


def isotonic(scores_X: FloatArray, accepted_X: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The monotone map from scores to acceptance that fits best, as knots.

    Observations are put into bins of equal count, and bins that fall are pooled.
    """
    order = np.argsort(scores_X, kind="stable")
    bins = [part for part in np.array_split(order, _NUM_BINS) if len(part)]
    knots, acceptance = (
        np.array([values[part].mean() for part in bins]) for values in (scores_X, accepted_X)
    )
    counts = np.array([len(part) for part in bins], dtype=np.float64)
    # Bins of one and the same score may differ in their means' last bit.
    return np.maximum.accumulate(knots), rising_fit(acceptance, counts)


def fit(levels: Sequence[LevelPaths]) -> tuple[LevelCalibration, ...]:
    """Fit every level that has accepted paths; deeper ones go by the last of them."""
    fitted = []
    for level in levels:
        if not level.num_accepted:
            break
        knots, acceptance = isotonic(np.array(level.scores), np.array(level.accepted, dtype=float))
        fitted.append(
            LevelCalibration(
                log_probabilities=tuple(knots.tolist()),
                acceptance=tuple(acceptance.tolist()),
                continuation=level.num_going_on / max(1, level.num_followed),
            )
        )
    return tuple(fitted)


def calibration_error(calibration: Calibration, levels: Sequence[LevelPaths]) -> float:
    """Expected calibration error over all paths, ten bins of equal width."""
    parts = [
        (np.array([calibration.level(number).accepted(score) for score in level.scores]), level)
        for number, level in enumerate(levels, 1)
        if level.scores
    ]
    likely_X = np.concatenate([likely for likely, _ in parts])
    accepted_X = np.concatenate([np.array(level.accepted) for _, level in parts])
    bin_X = np.minimum((10 * likely_X).astype(int), 9)
    gaps = [abs(float((likely_X - accepted_X)[bin_X == index].sum())) for index in np.unique(bin_X)]
    return sum(gaps) / len(likely_X)


def calibrate(
    target: Target,
    draft: DraftModel,
    tree: DynamicTree,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    quiet: bool = False,
) -> Calibration:
    """Calibrate a draft on validation prompts; every third measures the error.

    Raises:
        UserError: Too few prompts, or none of the draft's paths is ever accepted.
    """
    if len(prompts) < _HELD_OUT:
        raise UserError(f"calibration needs {_HELD_OUT} prompts or more, there are {len(prompts)}")
    results = gather(target, draft, tree, prompts, max_new_tokens, quiet)
    held_out = by_level(results[::_HELD_OUT], tree.num_levels)
    kept = by_level([r for i, r in enumerate(results) if i % _HELD_OUT], tree.num_levels)
    num_rounds = sum(len(r.rounds) for i, r in enumerate(results) if i % _HELD_OUT)
    levels = fit(kept)
    if not any(level.scores for level in held_out):
        raise UserError(
            "the answers to the held-out prompts are too short to measure the error; give more "
            "prompts (--num-prompts)"
        )
    if not levels:
        raise UserError(
            f"none of {num_rounds} rounds accepted a drafted token; this draft cannot be calibrated"
        )
    found = Calibration(
        tree=tree,
        levels=levels,
        error=0.0,
        num_rounds=num_rounds,
        tokens_per_round=1 + sum(level.num_accepted for level in kept) / num_rounds,
    )
    return found.replace(error=calibration_error(found, held_out))


def calibrate_folder(config: CalibrateConfig, quiet: bool = False) -> Calibration:
    """The verb `calibrate`: calibrate a draft folder and store the result in its config.json.

    Raises:
        UserError: A missing or foreign draft, target or data set, or too few prompts.
    """
    if not config.draft:
        raise UserError("there is no draft to calibrate; give --draft DIR")
    require_draft_folder("draft", config.draft)
    bounds = {name: getattr(config, name) for name in DynamicTree.model_fields}
    tree = build_config(DynamicTree, bounds, "calibrate")
    seed = derive_seed(config.seed, "data-choose")
    conversations = load_conversations(config.data, config.num_prompts, seed)
    if len(conversations) < _HELD_OUT:
        raise UserError(
            f"{config.data} has {len(conversations)} prompts; calibration needs {_HELD_OUT} or more"
        )
    if len(conversations) < config.num_prompts:
        warn(f"{config.data} has {len(conversations)} prompts; {config.num_prompts} were asked for")
    target = load_placed(config)
    folder = Path(config.draft)
    draft = load_draft(folder, target.device, target.dtype)
    prompts = build_prompts(target, conversations)
    require_room(target, prompts, config.max_new_tokens)
    found = calibrate(target, draft, tree, prompts, config.max_new_tokens, quiet)
    # The configuration alone: the weights stay as they are, whatever the precision here.
    changed = draft.config.replace(calibration=found)
    write_json(folder / CONFIG_FILE, changed.model_dump(mode="json"))
    return found
