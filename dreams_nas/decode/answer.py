"""An answer for users: its text, who wrote each token, and what the rounds did."""

from dataclasses import dataclass
from typing import Any

from dreams_nas.decode.accept import clip_accepted
from dreams_nas.decode.engine import DecodeResult, Plan
from dreams_nas.decode.plan import TreePlan
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.space.tree import StaticTree


@dataclass(frozen=True)
class Piece:
    """Text that one token added to an answer."""

    text: str
    """Empty for special tokens and inside characters of several tokens."""
    token: int
    """Its id."""
    is_accepted: bool
    """Whether the draft proposed it; otherwise the target said it itself."""


@dataclass(frozen=True)
class Answer:
    """One answer and what its rounds did."""

    text: str
    """The answer, special tokens left out, ending with the stop string that ended it."""
    result: DecodeResult
    """Tokens, rounds and times."""
    plan: Plan | None
    """What was drafted; None for plain decoding."""
    settings: GenerationSettings
    """What tokens were chosen by, the target's own settings filled in."""
    num_prompt_tokens: int

    @property
    def _num_levels(self) -> int | None:
        """Levels that every round drafts; None where each round decides, or nothing is drafted."""
        return self.plan.num_levels if isinstance(self.plan, TreePlan) else None

    def statistics(self) -> dict[str, Any]:
        """Rounds and times for machines; null where there is nothing to divide by."""
        result = self.result
        num_decoded, num_rounds = max(0, len(result.tokens) - 1), len(result.rounds)
        accepted = clip_accepted([r.num_accepted for r in result.rounds], len(result.tokens))
        levels = self._num_levels
        speculates = self.plan is not None and num_rounds
        return {
            "answer": self.text,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": len(result.tokens),
            "num_rounds": num_rounds,
            "acceptance_length": num_decoded / num_rounds if speculates else None,
            "acceptance_rate": (
                sum(accepted) / (levels * num_rounds) if levels and num_rounds else None
            ),
            "accepted": list(accepted) if self.plan is not None else None,
            "stopped": result.stopped,
            "prefill_ms": 1e3 * result.prefill_s,
            "decode_ms": 1e3 * result.decode_s,
            "tokens_per_s": num_decoded / result.decode_s if num_decoded else None,
            "policy": (StaticTree() if self.plan is None else self.plan).describe(),
            "settings": self.settings.describe(),
        }

    def describe(self) -> str:
        """Rounds and times in one line for people."""
        s = self.statistics()
        parts = [f"{s['num_tokens']} tokens in {s['num_rounds']} rounds after the prefill"]
        if s["acceptance_length"] is not None:
            parts.append(f"acceptance length {s['acceptance_length']:.2f} (tokens per round)")
        if s["acceptance_rate"] is not None:
            rate, levels = s["acceptance_rate"], self._num_levels
            parts.append(f"acceptance rate {rate:.2f} (accepted / {levels} levels)")
        parts.append(f"prefill {s['prefill_ms']:.1f} ms, decoding {s['decode_ms']:.1f} ms")
        if s["tokens_per_s"] is not None:
            parts.append(f"{s['tokens_per_s']:.1f} tokens/s")
        chosen = ", ".join(f"{name} {value}" for name, value in s["settings"].items())
        return "; ".join([*parts, "greedy" if chosen == "do_sample False" else chosen])

    def trace(self) -> dict[str, Any]:
        """Everything about the rounds, for a JSON file.

        `parents` are each node's, by number, -1 the root.
        """
        fixed = self.plan.tree.parents if isinstance(self.plan, TreePlan) else ()
        return {
            **self.statistics(),
            "tokens": self.result.tokens,
            "rounds": [
                {
                    "drafted": list(done.drafted),
                    "parents": list(fixed if done.parents is None else done.parents),
                    "accepted_path": list(done.path),
                    "ms": 1e3 * done.seconds,
                }
                for done in self.result.rounds
            ],
        }
