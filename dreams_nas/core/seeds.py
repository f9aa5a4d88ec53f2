"""One root seed; each stage derives its own from its name."""

import hashlib

_NUM_SEED_BITS = 63
"""Fits a signed 64-bit integer, which torch, numpy and optuna all take."""


def derive_seed(root: int, *names: str | int) -> int:
    """Derive the seed of a stage from the root seed and the stage's name.

    The same on every machine and in every process (sha256, not Python's salted `hash`), and
    independent between names: `derive_seed(0, "train")`, `derive_seed(0, "search", 3)`.

    Returns:
        An integer in [0, 2**63). numpy's legacy `RandomState` takes 32 bits only; use
        `np.random.default_rng`.
    """
    # Length prefixes keep ("ab", "c") apart from ("a", "bc"), the type keeps 1 apart from "1".
    parts = [f"{type(name).__name__}:{len(str(name))}:{name}" for name in (root, *names)]
    digest = hashlib.sha256("|".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _NUM_SEED_BITS)
