"""Shared by all tests: offline, one thread, fixed seeds, a machine lock of our own."""

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch or transformers, and inherited by the programs tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_machine_lock() -> Iterator[None]:
    """Tests assert no times, so they neither wait for a measurement nor hold one up."""
    with tempfile.TemporaryDirectory(prefix="dreams-nas-tests-") as folder:
        os.environ["DREAMS_NAS_LOCK"] = str(Path(folder) / "lock")
        yield


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Seed every generator that is loaded; torch stays unloaded where a test does without."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder of the checkout."""
    return Path(__file__).resolve().parent.parent
