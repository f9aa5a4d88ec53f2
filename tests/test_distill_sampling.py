"""Batches and subnets of a step follow from its number and the seed."""

import pytest

from dreams_nas.distill.sampling import BatchSampler, SubnetSampler
from dreams_nas.space.search_space import SearchSpace, load_search_space

LENGTHS = {index: 20 + (index * 7) % 50 for index in range(60) if index != 13}


def test_every_answer_comes_once_per_epoch_within_the_budget() -> None:
    sampler = BatchSampler(LENGTHS, batch_tokens=200, seed=1)
    seen: list[int] = []
    index = 0
    while len(seen) < 2 * len(LENGTHS):
        batch = sampler.batch(index)
        assert len(batch) * max(LENGTHS[i] for i in batch) <= 200
        seen += batch
        index += 1
    assert sorted(seen[: len(LENGTHS)]) == sorted(LENGTHS)
    assert sorted(seen[len(LENGTHS) :]) == sorted(LENGTHS)
    assert seen[: len(LENGTHS)] != seen[len(LENGTHS) :]
    padded = sum(
        len(b) * max(LENGTHS[i] for i in b) for b in (sampler.batch(k) for k in range(index))
    )
    assert padded < 1.25 * 2 * sum(LENGTHS.values())


def test_batches_depend_on_index_and_seed_alone() -> None:
    one, other = BatchSampler(LENGTHS, 200, seed=1), BatchSampler(LENGTHS, 200, seed=1)
    late = other.batch(40)
    assert [one.batch(k) for k in range(41)][40] == late
    assert one.batch(3) == other.batch(3)
    different = BatchSampler(LENGTHS, 200, seed=2)
    assert [one.batch(k) for k in range(5)] != [different.batch(k) for k in range(5)]


def test_sandwich_has_both_ends_and_takes_taps_in_turns() -> None:
    space = load_search_space("demo")
    sampler = SubnetSampler(space, num_random=2, seed=4)
    largest, smallest = [], []
    for step in range(4):
        archs = sampler.choose(step, progress=1.0)
        assert 2 <= len(archs) <= 4
        assert all(space.contains(arch) for arch in archs)
        largest.append(archs[0])
        smallest.append(archs[1])
    assert largest[0] == space.largest()
    assert {a.replace(tap="three") for a in largest} == {space.largest()}
    assert {a.replace(tap="last") for a in smallest} == {space.smallest().replace(tap="last")}
    for ends in (largest, smallest):
        assert {a.tap for a in ends} == {"last", "three"}


def test_choice_follows_the_step_and_the_seed() -> None:
    space = load_search_space("fuse")
    sampler = SubnetSampler(space, num_random=3, seed=4)
    again = SubnetSampler(space, num_random=3, seed=4)
    assert [sampler.choose(k, 0.5) for k in range(9)] == [again.choose(k, 0.5) for k in range(9)]
    other = SubnetSampler(space, num_random=3, seed=5)
    assert sampler.choose(3, 1.0)[2:] != other.choose(3, 1.0)[2:]
    drawn = {arch for step in range(40) for arch in sampler.choose(step, 1.0)}
    assert len(drawn) > 100
    assert {arch.tap for arch in drawn} == set(space.tap)


@pytest.mark.parametrize(
    ("progress", "is_open"),
    [(0.0, (0.75, 1.0)), (0.2, (0.5, 0.75, 1.0)), (0.5, (0.25, 0.5, 0.75, 1.0))],
)
def test_widths_open_one_after_the_other(progress: float, is_open: tuple[float, ...]) -> None:
    space = SearchSpace(head_ratio=(0.25, 0.5, 0.75, 1.0), depth=(1, 2, 3), vocab=(0.25, 1.0))
    sampler = SubnetSampler(space, num_random=2, seed=0)
    assert sampler.open_choices("head_ratio", progress) == is_open
    assert sampler.open_choices("depth", progress) == (1, 2, 3)
    for step in range(20):
        for arch in sampler.choose(step, progress):
            assert arch.head_ratio in is_open
    assert sampler.choose(0, progress)[1].head_ratio == is_open[0]
