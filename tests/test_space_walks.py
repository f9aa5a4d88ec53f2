"""Rank paths and walks: acceptance counted on recorded answers."""

from pathlib import Path

import numpy as np
import pytest
from fake_ranks import build_ranks

from dreams_nas.core.errors import UserError
from dreams_nas.space.rank_paths import RankPaths, load_rank_paths, save_rank_paths
from dreams_nas.space.tree import StaticTree
from dreams_nas.space.walks import accepted_levels, walk

TREES = {
    "empty": StaticTree(),
    "chain": StaticTree.chain(4),
    "wide": StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2)]),
    "one": StaticTree.from_paths([(0,), (3,)]),
}


def slow_walk(paths: RankPaths, tree: StaticTree) -> list[tuple[int, int, int, int]]:
    """(prompt, root, accepted, tokens) of each round, as one would write it down."""
    nodes = set(tree.paths)
    rounds = []
    for prompt in range(paths.num_prompts):
        start, length = int(paths.starts_P[prompt]), int(paths.answer_lengths_P[prompt])
        root = 0
        while root < length - 1:
            ranks = [int(rank) for rank in paths.ranks_RL[start + root]]
            accepted = 0
            while accepted < len(ranks) and tuple(ranks[: accepted + 1]) in nodes:
                accepted += 1
            rounds.append((prompt, root, accepted, min(accepted + 1, length - 1 - root)))
            root += accepted + 1
    return rounds


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_walk_equals_a_plain_loop(name: str, seed: int) -> None:
    paths = build_ranks(0.6, seed=seed)
    steps = walk(paths, TREES[name])
    expected = slow_walk(paths, TREES[name])
    columns = (steps.prompt_N, steps.root_N, steps.accepted_N, steps.tokens_N)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert int(steps.tokens_N.sum()) == steps.num_tokens
    assert steps.acceptance_length == sum(row[3] for row in expected) / len(expected)


def test_trees_differ_in_what_they_accept() -> None:
    paths = build_ranks(0.6)
    lengths = {name: walk(paths, tree).acceptance_length for name, tree in TREES.items()}
    assert lengths["empty"] == 1.0
    assert len(set(lengths.values())) == len(TREES)


def test_a_hand_counted_walk() -> None:
    # Answer of 6 tokens: roots 0..4. Root 0 accepts two levels, root 3 one; its bonus is token 5.
    ranks = np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, -1], [0, -1, -1]])
    paths = RankPaths.from_prompts([ranks], prompt_lengths=[10], kept_rows=[7], num_vocab=8)
    tree = StaticTree.from_paths([(0,), (0, 1)])
    steps = walk(paths, tree)
    assert steps.root_N.tolist() == [0, 3]
    assert steps.accepted_N.tolist() == [2, 1]
    assert steps.tokens_N.tolist() == [3, 2]
    assert steps.acceptance_length == 2.5
    assert steps.level_rates(3) == [1.0, 0.5, 0.0]


def test_the_bonus_token_behind_the_end_of_the_answer_does_not_count() -> None:
    ranks = np.array([[0, 0], [0, -1]])
    paths = RankPaths.from_prompts([ranks], prompt_lengths=[5], kept_rows=[5], num_vocab=8)
    steps = walk(paths, StaticTree.chain(2))
    assert steps.accepted_N.tolist() == [2]
    assert steps.tokens_N.tolist() == [2]
    assert steps.acceptance_length == 2.0


def test_unknown_and_unlisted_ranks_are_never_accepted() -> None:
    ranks = np.array([[-1, 0], [7, 0], [1, 0], [0, -1]])
    paths = RankPaths.from_prompts([ranks], prompt_lengths=[5], kept_rows=[5], num_vocab=8)
    assert accepted_levels(paths, StaticTree.chain(2)).tolist() == [0, 0, 0, 1]
    tree = StaticTree.from_paths([(1,), (7,), (7, 0)])
    assert accepted_levels(paths, tree).tolist() == [0, 2, 1, 0]


def test_no_rounds_give_no_acceptance_length() -> None:
    ranks = np.zeros((0, 3), dtype=np.int32)
    paths = RankPaths.from_prompts([ranks], prompt_lengths=[5], kept_rows=[5], num_vocab=8)
    steps = walk(paths, StaticTree.chain(2))
    assert steps.acceptance_length is None
    assert steps.level_rates(2) == [0.0, 0.0]


def test_offsets_count_cached_rows() -> None:
    ranks = [np.zeros((2, 1), dtype=np.int32), np.zeros((3, 1), dtype=np.int32)]
    paths = RankPaths.from_prompts(ranks, prompt_lengths=[10, 20], kept_rows=[4, 5], num_vocab=2)
    assert paths.target_kv_R.tolist() == [10, 11, 20, 21, 22]
    assert paths.draft_kv_R.tolist() == [4, 5, 5, 6, 7]
    assert paths.answer_lengths_P.tolist() == [3, 4]


def test_a_subset_walks_like_its_prompts_alone() -> None:
    paths = build_ranks(0.6)
    part = paths.subset([7, 2])
    assert part.ids == ("sample-7", "sample-2")
    assert part.prompt_lengths_P.tolist() == [97, 92]
    whole = slow_walk(paths, TREES["wide"])
    for new, old in enumerate((7, 2)):
        expected = [row[1:] for row in whole if row[0] == old]
        assert [row[1:] for row in slow_walk(part, TREES["wide"]) if row[0] == new] == expected


def test_rank_paths_survive_a_file(tmp_path: Path) -> None:
    paths = build_ranks(0.6)
    save_rank_paths(paths, tmp_path / "ranks.safetensors")
    loaded = load_rank_paths(tmp_path / "ranks.safetensors")
    np.testing.assert_array_equal(loaded.ranks_RL, paths.ranks_RL)
    np.testing.assert_array_equal(loaded.kept_rows_P, paths.kept_rows_P)
    assert (loaded.num_vocab, loaded.ids) == (paths.num_vocab, paths.ids)
    assert walk(loaded, TREES["wide"]).acceptance_length == (
        walk(paths, TREES["wide"]).acceptance_length
    )


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ranks.safetensors"
    with pytest.raises(UserError, match=r"ranks\.safetensors"):
        load_rank_paths(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read as rank paths"):
        load_rank_paths(path)


def test_ranks_outside_the_vocabulary_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="ranks < vocabulary"):
        RankPaths.from_prompts([np.array([[9]])], prompt_lengths=[1], kept_rows=[1], num_vocab=8)
