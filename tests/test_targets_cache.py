"""The target's cache: rows in place, commit as a move of rows, overflow before any damage."""

import pytest
import torch

from dreams_nas.core.errors import RunError
from dreams_nas.targets.cache import PreallocatedCache

LAYERS, HEADS, CAPACITY, SIZE = 3, 2, 10, 4


def build_cache() -> PreallocatedCache:
    return PreallocatedCache(LAYERS, HEADS, CAPACITY, SIZE, torch.float64, torch.device("cpu"))


def rows(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * LAYERS, 1, HEADS, num_rows, SIZE)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def write(cache: PreallocatedCache, values: torch.Tensor) -> list[torch.Tensor]:
    seen = []
    for layer in range(LAYERS):
        seen += cache.update(values[2 * layer], values[2 * layer + 1], layer)
    return seen


def test_update_returns_views_of_all_rows_without_copies():
    cache = build_cache()
    first, second = rows(3, 0), rows(2, 1)
    write(cache, first)
    cache.commit(range(3))
    seen = write(cache, second)
    for slot, view in enumerate(seen):
        torch.testing.assert_close(view, torch.cat((first[slot], second[slot]), 2), rtol=0, atol=0)
    pointer = seen[0].untyped_storage().data_ptr()
    assert all(view.untyped_storage().data_ptr() == pointer for view in seen)


@pytest.mark.parametrize("kept", [[], [0], [0, 1, 2], [0, 2], [0, 3, 4], [1], [2, 3], [4]])
def test_commit_keeps_these_rows_in_order(kept):
    cache = build_cache()
    old, new = rows(4, 0), rows(5, 1)
    write(cache, old)
    cache.commit(range(4))
    write(cache, new)
    cache.commit(kept)
    assert cache.length == cache.get_seq_length() == 4 + len(kept)
    expected = torch.cat((old, new[:, :, :, kept]), 3)
    torch.testing.assert_close(cache.committed(), expected, rtol=0, atol=0)


def test_prefix_commit_moves_nothing(monkeypatch):
    cache = build_cache()
    monkeypatch.setattr(cache, "_move", lambda kept: pytest.fail("a prefix was moved"))
    write(cache, rows(5, 0))
    cache.commit([0, 1, 2])
    assert cache.length == 3


def test_uncommitted_pass_is_overwritten():
    cache = build_cache()
    write(cache, rows(6, 0))
    new = rows(2, 1)
    write(cache, new)
    cache.commit([0, 1])
    torch.testing.assert_close(cache.committed(), new, rtol=0, atol=0)


def test_overflow_names_capacity_and_need_and_damages_nothing():
    cache = build_cache()
    old = rows(8, 0)
    write(cache, old)
    cache.commit(range(8))
    with pytest.raises(RunError, match=r"10 rows cannot take 3 more behind 8 .* \(11 needed\)"):
        write(cache, rows(3, 1))
    torch.testing.assert_close(cache.committed(), old, rtol=0, atol=0)
    write(cache, rows(2, 2))  # exactly full is fine
    cache.commit([0, 1])
    assert cache.length == CAPACITY


def test_reset_allows_reuse():
    cache = build_cache()
    cache.position_delta = -3
    write(cache, rows(4, 0))
    cache.commit(range(4))
    cache.reset()
    assert (cache.length, cache.position_delta) == (0, 0)
    new = rows(2, 1)
    write(cache, new)
    cache.commit([0, 1])
    torch.testing.assert_close(cache.committed(), new, rtol=0, atol=0)


def test_bytes_equal_the_arithmetic():
    assert build_cache().num_bytes == LAYERS * 2 * HEADS * CAPACITY * SIZE * 8


@pytest.mark.parametrize("kept", [[5], [2, 1], [1, 1], [-1, 3]])
def test_impossible_rows_are_refused(kept):
    cache = build_cache()
    write(cache, rows(5, 0))
    with pytest.raises(AssertionError):
        cache.commit(kept)


def test_what_transformers_asks_of_a_cache():
    cache = build_cache()
    assert bool(cache)
    assert len(cache) == LAYERS
    assert cache.get_mask_sizes(4, 0) == (4, 0)
    write(cache, rows(3, 0))
    assert cache.get_seq_length() == 0, "rows count once they are committed"
    cache.commit([0, 1, 2])
    assert cache.get_mask_sizes(4, 1) == (7, 0)
    assert cache.get_max_length() == CAPACITY
    with pytest.raises(AssertionError, match="commit"):
        cache.crop(1)


def test_commit_inside_and_outside_of_inference_mode():
    cache = build_cache()
    with torch.inference_mode():
        write(cache, rows(4, 0))
    cache.commit([1, 3])
    write(cache, rows(4, 1))
    with torch.inference_mode():
        cache.commit([0, 3])
    expected = torch.cat((rows(4, 0)[:, :, :, [1, 3]], rows(4, 1)[:, :, :, [0, 3]]), 3)
    torch.testing.assert_close(cache.committed(), expected, rtol=0, atol=0)
