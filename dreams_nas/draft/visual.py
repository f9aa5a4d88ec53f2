"""Which image tokens the draft sees: one function for training, replay, profiling and decoding.

Shapes: T prompt positions, R rows kept.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def num_kept(image_spans: Sequence[tuple[int, int]], keep_ratio: float) -> tuple[int, ...]:
    """Image tokens kept of each image: ceil(keep_ratio x image tokens)."""
    # The tiny subtraction keeps 0.1 * 30 = 3.0000000000000004 from becoming 4.
    return tuple(math.ceil(keep_ratio * (stop - start) - 1e-9) for start, stop in image_spans)


def kept_rows(
    num_rows: int,
    image_spans: Sequence[tuple[int, int]],
    keep_ratio: float,
    importance_T: Tensor | None,
    device: torch.device | None = None,
) -> Tensor:
    """Rows of a prompt that a draft of this keep ratio holds, ascending.

    A row goes if and only if its token (position row + 1) is a dropped image token. Ties of the
    importance go to the lower index. Never looks at the values on the host.

    Args:
        num_rows: Rows of the prompt: its tokens, since the last row takes the first answer token.
        image_spans: [start, stop) of each image's tokens.
        keep_ratio: Share of image tokens to keep, [0, 1].
        importance_T: Importance by position; may be None at keep ratios 0 and 1.
        device: Of the result when there is no importance.

    Returns:
        Row indexes, int64, [R].
    """
    device = importance_T.device if importance_T is not None else device
    rows = torch.arange(num_rows, device=device)
    if keep_ratio >= 1 or not image_spans:
        return rows
    pieces: list[Tensor] = []
    position = 0
    for (start, stop), keep in zip(image_spans, num_kept(image_spans, keep_ratio), strict=True):
        pieces.append(torch.arange(position, start, device=device))
        if keep:
            assert importance_T is not None, "keep ratios strictly between 0 and 1 need importance"
            order = torch.argsort(importance_T[start:stop], descending=True, stable=True)
            pieces.append(torch.sort(order[:keep]).values + start)
        position = stop
    pieces.append(torch.arange(position, num_rows + 1, device=device))
    tokens = torch.cat(pieces)
    # Position 0 has no row of its own: row t belongs to the token of position t + 1.
    return tokens[1:] - 1 if image_spans[0][0] > 0 else tokens[tokens > 0] - 1
