"""What only a GPU can tell: near-ties in half precision, shares of rounds, graphs, bandwidth.

    python -m dreams_nas.bench.device_check --device cuda --out check.json

Runs from the source tree. It decodes the embedded target in bfloat16 with a draft that knows the
answer and explains every difference in float64; then a LLaVA-1.6-7B decoder with random weights
behind a long prompt: shares of rounds, eager and captured, the draft's step against the time that
its bytes take, attention over the prefix masked and unmasked. Random weights change no time, but
nothing is accepted: a round there is a plain step that pays for its draft.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dreams_nas.bench.losslessness import Judge, build_float64, first_difference
from dreams_nas.bench.oracle import OracleDraft
from dreams_nas.core.console import say
from dreams_nas.decode.adaptive import to_device
from dreams_nas.decode.drafting import ReadyDraft, ready_draft
from dreams_nas.decode.dynamic import DynamicPlan, grow
from dreams_nas.decode.engine import decode
from dreams_nas.decode.parts import Parts, shares
from dreams_nas.decode.plan import TreePlan, build_tree_plan
from dreams_nas.decode.static import StaticDraft, StaticTarget
from dreams_nas.draft.config import DraftConfig
from dreams_nas.draft.model import DraftModel
from dreams_nas.features.conversations import load_conversations
from dreams_nas.space.arch import NAMED_ARCHS
from dreams_nas.space.policy import DynamicTree
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.families import wrap_model
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.loading import load_target
from dreams_nas.targets.protocol import TargetInputs

_TREES = {
    "chain of 5": StaticTree.chain(5),
    "3 levels, 12 nodes": StaticTree.from_paths(
        [(a,) for a in range(4)] + [(0, b) for b in range(4)] + [(0, 0, c) for c in range(4)]
    ),
}
_NUM_WARMUP = 3
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}


def audit(target: HuggingFaceTarget, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Decode with an oracle along every tree and explain each first difference."""
    judge = Judge(target, build_float64)
    found: dict[str, Any] = {"num_tokens_checked": 0, "explained_near_ties": 0, "mismatched": 0}
    largest = 0.0
    for conversation in load_conversations("embedded:test", num_prompts, 0):
        inputs = target.prepare(conversation.messages, conversation.load_images())
        plain = decode(target, inputs, max_new_tokens=max_new_tokens).tokens
        draft = OracleDraft(plain, target.spec.dims.vocab)
        for tree in _TREES.values():
            plan = build_tree_plan(tree, target.device, target.dtype)
            tokens = decode(
                target, inputs, max_new_tokens=max_new_tokens, draft=draft, plan=plan
            ).tokens
            place = first_difference(plain, tokens)
            found["num_tokens_checked"] += len(plain) if place is None else place + 1
            if place is None:
                continue
            explained = False
            if place < min(len(plain), len(tokens)):
                gap, tolerance, explained = judge.gap(
                    inputs, plain[:place], plain[place], tokens[place]
                )
                largest = max(largest, gap / tolerance)
            found["explained_near_ties" if explained else "mismatched"] += 1
    return {**found, "largest_gap_over_tolerance": largest}


def build_random(shape: dict[str, int], device: str, dtype: torch.dtype) -> HuggingFaceTarget:
    """A LLaVA with this decoder, a tiny vision tower and random weights."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    tower = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = LlavaConfig(vision_config=tower, text_config=LlamaConfig(**shape), image_token_id=3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlavaForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    return wrap_model(model)


def build_random_draft(target: HuggingFaceTarget) -> ReadyDraft:
    """An EAGLE-3 draft of that target with random weights."""
    spec = target.spec
    config = DraftConfig(
        arch=NAMED_ARCHS["eagle3"],
        target_dims=spec.dims,
        rms_norm_eps=spec.rms_norm_eps,
        target_name=spec.name,
        tokenizer_hash=spec.tokenizer_hash,
        embedding_hash=spec.embedding_hash,
    )
    draft = DraftModel(config, target.inv_freq.cpu(), torch.arange(spec.dims.vocab))
    draft.body.initialise(torch.Generator().manual_seed(0))
    return ready_draft(draft.to(target.device, target.dtype), target)


def milliseconds(run: Callable[[], Any], device: torch.device, num_repeats: int) -> float:
    """Median time of a call, the device waited for."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    for _ in range(_NUM_WARMUP):
        once()
    return median(once() for _ in range(num_repeats))


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * len(source) / (1e-3 * milliseconds(lambda: copy.copy_(source), device, 10))


def measure_rounds(
    target: Any, draft: Any, inputs: TargetInputs, plan: TreePlan, num_tokens: int
) -> dict[str, Any]:
    """Milliseconds of a round, and the shares of its parts in further, watched rounds."""
    arguments = {"max_new_tokens": num_tokens, "draft": draft, "plan": plan, "stop_ids": ()}
    decode(target, inputs, **arguments)  # captures, where something is captured
    free = decode(target, inputs, **arguments)
    parts = Parts(target.device)
    watched = decode(target, inputs, parts=parts, **arguments)
    return {
        "round_ms": 1e3 * median(done.seconds for done in free.rounds),
        "shares": shares(parts.seconds, watched.decode_s),
        "tokens": free.tokens,
    }


@torch.inference_mode()
def never_waits(
    target: HuggingFaceTarget, draft: ReadyDraft, inputs: TargetInputs, plan: TreePlan
) -> bool | None:
    """Whether a round waits for the GPU only where it fetches its tokens; None on a CPU."""
    if target.device.type != "cuda":
        return None
    taps, num_rows = draft.target_layer_ids, plan.num_nodes + 1
    cache = target.build_cache(len(inputs.input_ids_T) + 2 * num_rows + 2)
    prefill = target.prefill(inputs, cache, target_layer_ids=taps)
    bounds = DynamicTree(num_levels=3, width=4, num_nodes=12)
    session = draft.open_session(target, DynamicPlan(bounds), cache.capacity)
    root_1 = prefill.logits_V[None].argmax(dim=-1)
    session.prefill(prefill, root_1, inputs)
    torch.cuda.synchronize(target.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens_Q = torch.cat([root_1, session.propose(plan)])
        out = target.verify(tokens_Q, plan.depths_Q, plan.mask_QQ, cache, target_layer_ids=taps)
        cache.commit([0, num_rows - 1])  # a gap: rows are moved
        kept_2 = to_device([0, num_rows - 1], target.device)
        session.sync(out.logits_QV.argmax(dim=-1)[kept_2], out.features_QF[kept_2])
        grow(session, bounds)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        say(f"waits for the GPU: {error}", False)
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@torch.inference_mode()
def attention_ms(
    dims: Sequence[int], num_rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """One layer's verification: one masked attention, or unmasked prefix, masked tree and merge.

    Args:
        dims: Query heads, key/value heads, head size.
        num_rows: Verified rows.
        length: Committed rows.
        device: Where.
        dtype: Of all tensors.
    """
    heads, groups, size = dims
    q = torch.randn(1, heads, num_rows, size, device=device, dtype=dtype)
    k, v = (
        torch.randn(1, groups, length + num_rows, size, device=device, dtype=dtype)
        for _ in range(2)
    )
    low = torch.finfo(dtype).min
    mask = torch.full((num_rows, num_rows), low, device=device, dtype=dtype).triu_(1)
    whole = F.pad(mask, (length, 0))[None, None]
    repeat = heads // groups

    def repeated() -> tuple[Tensor, Tensor]:
        """Keys and values of all query heads, as decoders of transformers make them for a mask."""
        if repeat == 1:
            return k, v
        return k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(q, *repeated(), attn_mask=whole)

    def split() -> Tensor:
        k_all, v_all = repeated()
        before, weight_before = prefix_attention(q, k_all[:, :, :length], v_all[:, :, :length])
        scores = q @ k_all[:, :, length:].transpose(-1, -2) * size**-0.5 + mask
        weight_tree = scores.float().logsumexp(dim=-1, keepdim=True)
        inside = (scores.float() - weight_tree).exp().to(dtype) @ v_all[:, :, length:]
        share = (weight_before.float() - weight_tree).sigmoid()
        return (before * share + inside * (1 - share)).to(dtype)

    difference = float((masked().float() - split().float()).abs().max())
    assert difference < 0.05, f"the two ways differ by {difference}"
    return {
        "masked_ms": milliseconds(masked, device, 30),
        "split_ms": milliseconds(split, device, 30),
    }


def prefix_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention without a mask, and the logarithm of its weights' sum, [1, H, Q, 1]."""
    if q.is_cuda:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out[0], out[1][..., None]


_LLAVA_7B = {
    "vocab_size": 32_064,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
_SMALL = {
    **_LLAVA_7B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def check(device: str, *, small: bool = False) -> dict[str, Any]:
    """Run everything.

    Args:
        device: "cpu" or "cuda:N".
        small: A decoder of 4 layers in float32 and few prompts, to try the script itself.
    """
    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[name], start = now - start, now
        say(f"{name}: {seconds[name]:.1f} s", False)

    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "small": small,
    }
    embedded = load_target("embedded", device, "bfloat16")
    result["audit"] = audit(embedded, 3 if small else 60, 96)
    lap("audit")
    prompt, num_tokens = (200, 12) if small else (2900, 64)
    shape, dtype = (_SMALL, torch.float32) if small else (_LLAVA_7B, torch.bfloat16)
    target = build_random(shape, device, dtype)
    draft = build_random_draft(target)
    ids_T = torch.arange(prompt) % (target.spec.dims.vocab - 8) + 8
    inputs = target.build_inputs(ids_T)
    lap("building")
    plain = decode(target, inputs, max_new_tokens=num_tokens, stop_ids=())
    result["plain_step_ms"] = 1e3 * median(done.seconds for done in plain.rounds)
    capacity = prompt + num_tokens + max(tree.num_nodes for tree in _TREES.values()) + 1
    static = StaticTarget(target, capacity)
    result["rounds"] = {}
    for name, tree in _TREES.items():
        plan = build_tree_plan(tree, target.device, target.dtype)
        eager = measure_rounds(target, draft, inputs, plan, num_tokens)
        static_draft = StaticDraft(draft, target, plan, capacity)
        captured = measure_rounds(static, static_draft, inputs, plan, num_tokens)
        for arm in (eager, captured):
            arm["same_as_plain"] = arm.pop("tokens") == plain.tokens
        result["rounds"][name] = {
            "never_waits": never_waits(target, draft, inputs, plan),
            "eager": eager,
            "captured": captured,
        }
    lap("rounds")
    result["draft_step"] = draft_step(target, draft, inputs)
    dims = target.spec.dims
    sizes = (dims.num_heads, dims.num_kv_heads, dims.head_size)
    result["attention"] = {
        f"{rows} rows": attention_ms(sizes, rows, prompt, target.device, target.dtype)
        for rows in (6, 16, 60)
    }
    lap("steps")
    return {**result, "seconds": seconds}


def draft_step(
    target: HuggingFaceTarget, draft: ReadyDraft, inputs: TargetInputs
) -> dict[str, float]:
    """A chain's step, eager and captured, against the time that reading its bytes takes."""
    chain = {n: build_tree_plan(StaticTree.chain(n), target.device, target.dtype) for n in (1, 9)}
    capacity = len(inputs.input_ids_T) + 1
    found = {}
    for name, drafter in (
        ("eager_ms", draft),
        ("captured_ms", StaticDraft(draft, target, chain[9], capacity)),
    ):
        cache = target.build_cache(capacity)
        with torch.inference_mode():
            prefill = target.prefill(inputs, cache, target_layer_ids=draft.target_layer_ids)
            session = drafter.open_session(target, chain[9], capacity)
            session.prefill(prefill, prefill.logits_V[None].argmax(dim=-1), inputs)
            long, short = (
                milliseconds(partial(session.propose, plan), target.device, 20)
                for plan in (chain[9], chain[1])
            )
        found[name] = (long - short) / 8
    weights = draft.weights
    tensors = [t for layer in weights.layers for t in layer if t is not None]
    tensors += [weights.norm_D, weights.head_VD]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    dims = target.spec.dims
    num_bytes += 2 * dims.num_kv_heads * dims.head_size * capacity * target.dtype.itemsize
    per_second = bandwidth(target.device)
    return {
        **found,
        "bytes": num_bytes,
        "gigabytes_per_second": per_second / 1e9,
        "bytes_over_bandwidth_ms": 1e3 * num_bytes / per_second,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    parser.add_argument("--small", action="store_true", help="seconds, to try the script itself")
    parser.add_argument("--out", help="JSON file for the figures")
    given = parser.parse_args()
    device = "cuda:0" if given.device == "cuda" else given.device
    text = json.dumps(check(device, small=given.small))
    if given.out:
        Path(given.out).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
