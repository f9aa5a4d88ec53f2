"""The order of a draft's guesses: greater logits first, equal ones by head row.

Replay counts ranks in this order (`replay.batched.count_above`), so drafting must keep to it.
Shapes: W rows, V head rows, K best guesses per row.
"""

import torch
from torch import Tensor

_INDEX_BITS = 32


def best_rows(logits_WV: Tensor, num_ranks: int) -> Tensor:
    """Head rows of the best guesses of some rows, the best first, [W * K].

    `topk` leaves open which of several equal entries it takes. In half precision equal logits are
    common, so there every entry becomes an integer that no other has: the logit's bits, which
    order like the logit once the negative ones are flipped, and below them the index. Never looks
    at a value on the host.

    Measured (microseconds of one CPU thread, bf16, 4 rows of 4,096, 4 ranks): `topk` 28, these
    integers 82, a stable sort 2,700.
    """
    if num_ranks == 1:
        return logits_WV.argmax(dim=-1)  # promises the first of equal entries
    if logits_WV.element_size() > 2:
        return logits_WV.topk(num_ranks, dim=-1).indices.flatten()
    bits_WV = (logits_WV + 0.0).view(torch.int16)  # adding turns -0 into 0, which it equals
    bits_WV = bits_WV ^ ((bits_WV >> 15) & 0x7FFF)
    keys_WV = bits_WV.to(torch.int64).bitwise_left_shift_(_INDEX_BITS)
    keys_WV -= torch.arange(keys_WV.shape[-1], device=keys_WV.device)
    return keys_WV.topk(num_ranks, dim=-1).indices.flatten()
