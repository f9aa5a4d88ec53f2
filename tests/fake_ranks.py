"""Random rank paths with known habits, in place of a replay."""

import numpy as np

from dreams_nas.space.rank_paths import RankPaths


def build_ranks(
    hit_rate: float = 0.7,
    *,
    seed: int = 0,
    num_prompts: int = 20,
    num_levels: int = 6,
    num_vocab: int = 4096,
    answer_length: int = 30,
    prompt_length: int = 90,
    kept_rows: int = 40,
) -> RankPaths:
    """Each level is the draft's best guess with `hit_rate`, else a geometric rank; some unknown.

    Roots of an answer are drawn independently: replay would correlate them, walks do not care.
    """
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(num_prompts):
        length = int(rng.integers(2, answer_length + 1))
        shape = (length - 1, num_levels)
        ranks = np.where(rng.random(shape) < hit_rate, 0, rng.geometric(0.5, shape))
        ranks = np.minimum(ranks, num_vocab - 1)
        ranks[rng.random(shape) < 0.03] = -1
        ends = np.arange(length - 1)[:, None] + np.arange(1, num_levels + 1) >= length
        prompts.append(np.where(ends, -1, ranks))
    return RankPaths.from_prompts(
        prompts,
        prompt_lengths=[prompt_length + i for i in range(num_prompts)],
        kept_rows=[kept_rows + i for i in range(num_prompts)],
        num_vocab=num_vocab,
        ids=[f"sample-{i}" for i in range(num_prompts)],
    )
