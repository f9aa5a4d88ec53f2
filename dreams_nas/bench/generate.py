"""The verb `generate`: one prompt, plainly or with a draft, and what its rounds did."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreams_nas.bench.arms import (
    PLAIN,
    WINNER_NAME,
    decode_arm,
    load_arm,
    ready_arm,
    require_draft_folders,
)
from dreams_nas.bench.config import GenerateConfig
from dreams_nas.bench.measure import clip_accepted
from dreams_nas.core.errors import UserError
from dreams_nas.decode.engine import DecodeResult
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.loading import load_placed
from dreams_nas.targets.prompts import load_image


@dataclass(frozen=True)
class Answer:
    """What `generate` found."""

    text: str
    """The answer, special tokens left out."""
    result: DecodeResult
    tree: StaticTree
    """What was drafted in each round; empty for plain decoding."""
    num_prompt_tokens: int

    def statistics(self) -> dict[str, Any]:
        """Rounds and times for machines; null where there is nothing to divide by."""
        result = self.result
        num_decoded, num_rounds = max(0, len(result.tokens) - 1), len(result.rounds)
        accepted = clip_accepted([r.num_accepted for r in result.rounds], len(result.tokens))
        levels = self.tree.num_levels
        return {
            "answer": self.text,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": len(result.tokens),
            "num_rounds": num_rounds,
            "acceptance_length": num_decoded / num_rounds if levels and num_rounds else None,
            "acceptance_rate": sum(accepted) / (levels * num_rounds)
            if levels and num_rounds
            else None,
            "accepted": list(accepted) if levels else None,
            "stopped": result.stopped,
            "prefill_ms": 1e3 * result.prefill_s,
            "decode_ms": 1e3 * result.decode_s,
            "tokens_per_s": num_decoded / result.decode_s if num_decoded else None,
            "policy": self.tree.describe(),
        }

    def describe(self) -> str:
        """Rounds and times in one line for people."""
        s = self.statistics()
        parts = [f"{s['num_tokens']} tokens in {s['num_rounds']} rounds after the prefill"]
        if s["acceptance_length"] is not None:
            parts.append(
                f"acceptance length {s['acceptance_length']:.2f} (tokens per round), acceptance "
                f"rate {s['acceptance_rate']:.2f} (accepted / {self.tree.num_levels} levels)"
            )
        parts.append(f"prefill {s['prefill_ms']:.1f} ms, decoding {s['decode_ms']:.1f} ms")
        if s["tokens_per_s"] is not None:
            parts.append(f"{s['tokens_per_s']:.1f} tokens/s")
        return "; ".join(parts)


def generate(config: GenerateConfig) -> Answer:
    """Answer one prompt.

    Images and draft folder are looked at before the target is loaded.

    Raises:
        UserError: No prompt, an image that is none, a missing target or draft, a prompt that does
            not fit, or a target whose generation config asks for other answers than greedy ones.
    """
    if not config.prompt.strip():
        raise UserError('there is no prompt; give --prompt "..."')
    images = [load_image(path) for path in config.images]
    if config.draft is not None:
        require_draft_folders({WINNER_NAME: config.draft})
    target = load_placed(config)
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": config.prompt}]
    inputs = target.prepare([{"role": "user", "content": content}], images)
    arm = PLAIN
    if config.draft is not None:
        arm = load_arm(WINNER_NAME, Path(config.draft), target, config.chain)
    result = decode_arm(target, ready_arm(arm, target), inputs, config.max_new_tokens)
    return Answer(
        text=target.decode_text(result.tokens),
        result=result,
        tree=arm.tree,
        num_prompt_tokens=len(inputs.input_ids_T),
    )
