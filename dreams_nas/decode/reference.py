"""Speculative decoding written to be read: no cache, no mask, no tree tensors.

It drafts one node at a time by running the whole draft over the committed rows and the node's own
path, and accepts by comparing with what the target says next. The fast path must propose the same
tokens and accept the same ones; it is only allowed to be quicker.

Shapes: T committed rows, D hidden, F tapped features.
"""

import torch
from torch import Tensor

from dreams_nas.decode.drafting import ReadyDraft
from dreams_nas.decode.engine import decode
from dreams_nas.draft.layers import build_rotary, forward_rows, fuse, head
from dreams_nas.draft.visual import kept_rows
from dreams_nas.space.tree import RankPath, StaticTree
from dreams_nas.targets.protocol import Target, TargetInputs


class _NoCache:
    """Every pass starts from nothing."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


def _run_draft(
    draft: ReadyDraft, embeddings_TD: Tensor, features_TD: Tensor, positions_T: Tensor
) -> Tensor:
    """State of the last row, [D]."""
    num_rows = len(positions_T)
    causal = torch.ones(num_rows, num_rows, dtype=torch.bool, device=positions_T.device).tril()
    rotary = build_rotary(draft.weights.inv_freq, positions_T, embeddings_TD.dtype)
    states = forward_rows(
        draft.weights, embeddings_TD[None], features_TD[None], rotary, _NoCache(), causal
    )
    return states[0, -1]


@torch.inference_mode()
def reference_rounds(
    target: Target, inputs: TargetInputs, draft: ReadyDraft, tree: StaticTree, max_new_tokens: int
) -> tuple[list[int], list[tuple[tuple[int, ...], int]]]:
    """Decode plainly, then say what each round of a draft tree would have done on the way.

    Returns:
        The answer, and for every round the drafted tokens in node order and how many of them were
        accepted.
    """
    answer = decode(target, inputs, max_new_tokens=max_new_tokens).tokens
    length = len(inputs.input_ids_T)
    # One fresh pass over prompt and answer gives the features of all positions.
    cache = target.build_cache(length + len(answer))
    prefill = target.prefill(
        inputs, cache, target_layer_ids=draft.target_layer_ids, want_importance=True
    )
    features, embeddings = [prefill.features_TF], [prefill.embeddings_TD[1:]]
    for token in answer:
        token_1 = torch.tensor([token], device=target.device)
        depth_1 = torch.zeros_like(token_1)
        out = target.verify(token_1, depth_1, None, cache, target_layer_ids=draft.target_layer_ids)
        cache.commit([0])
        features.append(out.features_QF)
        embeddings.append(target.embed(token_1))
    fused_TD = fuse(draft.weights, torch.cat(features))
    embeddings_TD = torch.cat(embeddings)
    rows_R = kept_rows(
        length, inputs.image_spans, draft.keep_ratio, prefill.importance_T, target.device
    )
    rounds: list[tuple[tuple[int, ...], int]] = []
    done = 1  # tokens of the answer that are committed
    while done < len(answer):
        extra = torch.arange(length, length + done - 1, device=target.device)
        positions_T = torch.cat([rows_R, extra])
        tokens: dict[RankPath, int] = {}
        for path in tree.paths:
            rows_x, rows_f, places = embeddings_TD[positions_T], fused_TD[positions_T], positions_T
            state_D = _run_draft(draft, rows_x, rows_f, places)
            for level in range(1, len(path)):
                token_1 = torch.tensor([tokens[path[:level]]], device=target.device)
                rows_x = torch.cat([rows_x, target.embed(token_1)])
                rows_f = torch.cat([rows_f, state_D[None]])
                places = torch.cat([places, places[-1:] + 1])
                state_D = _run_draft(draft, rows_x, rows_f, places)
            order = head(draft.weights, state_D).argsort(descending=True, stable=True)
            token = int(order[path[-1]])
            ids_W = draft.vocab_ids_W
            tokens[path] = token if ids_W is None else int(ids_W[token])
        accepted = 0
        best: RankPath = ()
        while True:
            wanted = answer[done + accepted] if done + accepted < len(answer) else None
            steps = [p for p in tree.paths if p[:-1] == best and len(p) == accepted + 1]
            found = [p for p in steps if tokens[p] == wanted]
            if not found:
                break
            best, accepted = found[0], accepted + 1
        rounds.append((tuple(tokens[path] for path in tree.paths), accepted))
        done += accepted + 1
    return answer, rounds
