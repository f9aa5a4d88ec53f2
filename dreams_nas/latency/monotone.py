"""Rising fits: noise removed from what can only rise."""

import numpy as np

from dreams_nas.latency.grid import FloatArray


def rising_fit(values_X: FloatArray, weights_X: FloatArray | None = None) -> FloatArray:
    """The never falling sequence nearest to some values, by weighted squares.

    Neighbours that fall are pooled to their mean until none does.
    """
    weights_X = np.ones_like(values_X) if weights_X is None else weights_X
    blocks: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values_X.tolist(), weights_X.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, weight_2, count = blocks.pop()
            before, weight_1, count_1 = blocks.pop()
            total = weight_1 + weight_2
            blocks.append(((before * weight_1 + mean * weight_2) / total, total, count_1 + count))
    return np.concatenate([np.full(count, mean) for mean, _, count in blocks])
