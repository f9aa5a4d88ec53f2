"""The model card of an exported draft: what it is, for which target, what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from dreams_nas.core.console import markdown_table
from dreams_nas.core.errors import UserError
from dreams_nas.draft.config import DraftConfig
from dreams_nas.space.servable import serving_engines
from dreams_nas.space.tree import StaticTree

_ENGINE_NAMES = {"own": "dreams-nas", "vllm": "vLLM", "sglang": "SGLang"}


def model_card(config: DraftConfig, bench: Mapping[str, Any] | None = None) -> str:
    """Markdown of the card.

    Args:
        config: The exported draft.
        bench: A bench.json that measured this draft.

    Raises:
        UserError: No arm of the bench is this architecture with this policy.
    """
    parts = [
        f"# Draft for {config.target_name}",
        "A draft model for speculative decoding, found and trained by dreams-nas. It proposes "
        "tokens; its target verifies them, so that the answer is the target's own.",
        "## Architecture",
        _bullets(_architecture(config)),
        "## Target",
        _bullets(_target(config)),
        "## Policy",
        _bullets(_policy(config.policy)),
    ]
    if bench is not None:
        parts += _measured(config, bench)
    else:
        parts += ["## Measured", "Nothing was measured when this card was written."]
    parts += ["## Where it can be served", _bullets(_serving(config))]
    parts += ["## How to load", _how_to_load()]
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _architecture(config: DraftConfig) -> list[str]:
    arch, sizes, dims = config.arch, config.sizes, config.target_dims
    return [
        f"key `{arch.key}`",
        f"interaction {arch.interaction}, {arch.depth} decoder layer(s), hidden {dims.hidden}",
        f"reads the outputs of target blocks {', '.join(map(str, sizes.target_layer_ids))} "
        f"(counted from 0, of {dims.num_layers}; tap `{arch.tap}`)",
        f"{sizes.num_heads} query heads on {sizes.num_kv_heads} key/value heads of size "
        f"{dims.head_size}, {sizes.ffn} feed-forward channels",
        f"sees {100 * arch.keep_ratio:g} % of the image tokens; rows of image tokens carry the "
        f"target's {config.image_embedding} embedding",
        f"proposes {sizes.vocab:,} of {dims.vocab:,} tokens",
        "shares the target's token embedding and language model head, which are not stored here",
    ]


def _target(config: DraftConfig) -> list[str]:
    return [
        f"{config.target_name}",
        f"hash of the tokenizer `{config.tokenizer_hash}`",
        f"hash of the token embedding `{config.embedding_hash}`",
        "a target with other hashes is refused",
    ]


def _policy(policy: StaticTree | None) -> list[str]:
    if policy is None:
        return ["none was chosen; give one when decoding (`--chain LEVELS`)"]
    stated = policy.describe()
    if not policy.paths:
        return ["do not speculate: plain decoding was fastest where this was searched"]
    paths = " ".join(".".join(map(str, path)) for path in policy.paths)
    return [
        f"{stated['kind'].replace('_', ' ')}, {stated['levels']} levels, {stated['nodes']} nodes "
        f"(verification takes {policy.num_nodes + 1} rows)",
        f"rank paths of the nodes: `{paths}`",
    ]


def _measured(config: DraftConfig, bench: Mapping[str, Any]) -> list[str]:
    wanted = config.arch.model_dump(mode="json")
    policy = (config.policy or StaticTree()).describe()
    arms = bench["summary"]["arms"]
    names = [
        name for name, arm in arms.items() if arm["arch"] == wanted and arm["policy"] == policy
    ]
    if not names:
        raise UserError(
            f"no arm of this bench is draft '{config.arch.key}' with its policy of "
            f"{policy['nodes']} nodes (arms: {', '.join(arms)}); give the bench of this "
            "draft, or none"
        )
    headers = bench["table"]["headers"]
    drop = headers.index("speedup predicted")
    rows = [[v for i, v in enumerate(row) if i != drop] for row in bench["table"]["rows"]]
    parts = [
        "## Measured",
        f"This draft is arm `{names[0]}`.",
        _bullets(bench["conditions"]),
        markdown_table([h for i, h in enumerate(headers) if i != drop], rows),
        _bullets([line for line in bench["definitions"] if "predicted" not in line]),
        "\n".join(bench["findings"]),
        "## Predicted",
    ]
    predicted = arms[names[0]]["speedup_predicted"]
    if predicted is None:
        return [*parts, "No speedup was predicted."]
    return [
        *parts,
        f"From the latency table, before measuring: median {predicted['median']:.2f}, p10 "
        f"{predicted['p10']:.2f}, p90 {predicted['p90']:.2f} over prompts.",
    ]


def _serving(config: DraftConfig) -> list[str]:
    """The rules of `space/servable.py`, with the reasons against."""
    arch, dims = config.arch, config.target_dims
    weights = serving_engines(arch, dims)
    lines = ["dreams-nas: as it is, with its policy"]
    reasons = []
    if arch.keep_ratio < 1:
        reasons.append("it drops image tokens")
    if dims.num_layers - 1 in config.sizes.target_layer_ids:
        reasons.append("it reads the output of the last block")
    if dims.hidden % config.sizes.num_heads:
        reasons.append("its head count does not divide the hidden size")
    if reasons:
        return [*lines, f"vLLM and SGLang: not, because {' and '.join(reasons)}"]
    served = serving_engines(arch, dims, config.policy)
    for engine in weights:
        if engine == "own":
            continue
        how = (
            "the architecture and the policy fit"
            if engine in served
            else "the architecture fits, as a chain only; the speedup of a tree says nothing there"
        )
        lines.append(f"{_ENGINE_NAMES[engine]}: {how}; needs an export in its own format")
    return lines


def _how_to_load() -> str:
    return (
        "In the folder that holds this file:\n\n"
        "```python\n"
        "from dreams_nas.draft.model import load_draft\n"
        "from pathlib import Path\n"
        'draft = load_draft(Path("."))\n'
        "```\n\n"
        "Decoding with it (the target's folder, or `embedded`):\n\n"
        "```\n"
        'dreams-nas generate --target TARGET --draft . --image IMAGE --prompt "..."\n'
        "```"
    )
