"""The embedded target: a small vision-language model of charts that ships with the package.

Nothing here imports torch; the generator needs PIL and the Python library only.
"""

from pathlib import Path

EMBEDDED = "embedded"
"""The name that chooses this target (``--target embedded``)."""


def embedded_target_path() -> Path:
    """Return the folder with the shipped weights, tokenizer, processor and model card."""
    return Path(__file__).parent / "weights"


__all__ = ["EMBEDDED", "embedded_target_path"]
