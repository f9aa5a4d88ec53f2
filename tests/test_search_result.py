"""Pareto front, finalists, and the artefact of a search."""

import csv
from pathlib import Path

import numpy as np
import pytest
from fake_objective import IDENTITY, PLANTED, SPACE, evaluation, fake_evaluation
from fake_tables import DIMS

from dreams_nas.core.errors import UserError
from dreams_nas.core.yaml_data import read_yaml, write_yaml
from dreams_nas.search.objective import Evaluation
from dreams_nas.search.pareto import non_dominated, pareto_front
from dreams_nas.search.result import (
    Point,
    SearchResult,
    load_point,
    load_result,
    save_point,
    save_result,
)
from dreams_nas.search.winner import choose_winner, decompose_lift
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.tree import StaticTree

ARCHS = SPACE.enumerate(DIMS)
FOUND = [fake_evaluation(arch) for arch in ARCHS]


def test_non_dominated_against_every_pair() -> None:
    points = np.random.default_rng(0).integers(0, 6, (60, 3)).astype(float)
    expected = [not any((q <= p).all() and (q < p).any() for q in points) for p in points]
    assert non_dominated(points).tolist() == expected
    assert 0 < sum(expected) < len(points)
    assert non_dominated([(1.0, 2.0), (1.0, 2.0), (2.0, 2.0)]).tolist() == [True, True, False]
    assert non_dominated([]).tolist() == []


def test_pareto_front_trades_tau_against_the_cost_of_a_round() -> None:
    points = [(2.0, 6.0), (3.0, 7.0), (2.5, 8.0), (4.0, 9.0), (1.0, 5.0)]
    found = [
        evaluation(arch, 1.5, acceptance_length=tau, round_ms=ms)
        for arch, (tau, ms) in zip(ARCHS, points, strict=False)
    ]
    plain = evaluation(ARCHS[9], 1.0, tree=StaticTree(), acceptance_length=1.0, round_ms=1.0)
    front = pareto_front([*found, plain])
    assert [(e.acceptance_length, e.round_ms) for e in front] == [
        (1.0, 5.0),
        (2.0, 6.0),
        (3.0, 7.0),
        (4.0, 9.0),
    ]


def test_finalists_are_the_best_predicted_and_the_measured_best_wins() -> None:
    asked: list[list[float]] = []

    def measure(finalists: list[Evaluation]) -> list[float]:
        asked.append([e.speedup for e in finalists])
        return [1.5, 1.9, 1.7]

    choice = choose_winner(FOUND, measure)
    ranked = sorted(FOUND, key=lambda e: -e.speedup)
    assert asked == [[e.speedup for e in ranked[:3]]]
    assert choice.winner == ranked[1]
    assert [f.speedup_measured for f in choice.finalists] == [1.5, 1.9, 1.7]
    assert choice.finalists[0].speedup_predicted == ranked[0].speedup


def test_finalists_that_lose_to_plain_decoding_are_not_named() -> None:
    choice = choose_winner(FOUND, lambda finalists: [0.9] * len(finalists), num_finalists=2)
    assert choice.winner is None
    assert [f.speedup_measured for f in choice.finalists] == [0.9, 0.9]


def test_a_draft_predicted_slower_than_plain_is_no_finalist() -> None:
    slow = [evaluation(arch, 0.8) for arch in ARCHS[:3]]
    good = evaluation(ARCHS[5], 1.1)
    choice = choose_winner([*slow, good], lambda finalists: [1.2] * len(finalists))
    assert [f.arch for f in choice.finalists] == [ARCHS[5]]
    assert choice.winner == good


def test_lift_changes_one_choice_at_a_time() -> None:
    winner = fake_evaluation(PLANTED)
    rows = decompose_lift(winner, SPACE, DIMS, fake_evaluation)
    assert [(r.dimension, r.winner, r.baseline) for r in rows] == [
        ("tap", "last", "three"),
        ("depth", 2, 1),
        ("head_ratio", 0.5, 1.0),
        ("vocab", 0.25, 1.0),
    ]
    without_tap = fake_evaluation(PLANTED.replace(tap="three")).speedup
    assert rows[0].speedup_predicted == without_tap
    assert rows[0].lift == pytest.approx(winner.speedup / without_tap)


def build_result() -> SearchResult:
    choice = choose_winner(FOUND, lambda finalists: [1.5, 1.9, 1.7])
    assert choice.winner is not None
    lift = decompose_lift(choice.winner, SPACE, DIMS, fake_evaluation)
    return SearchResult(
        identity=IDENTITY,
        evaluations=tuple(FOUND),
        choice=choice,
        lift=tuple(lift),
        provenance={"seed": 0},
    )


def test_result_survives_its_folder(tmp_path: Path) -> None:
    result = build_result()
    save_result(result, tmp_path)
    assert load_result(tmp_path) == result
    assert load_point(tmp_path / "arch.yaml") == result.winner
    assert {path.name for path in tmp_path.iterdir()} == {
        "trials.csv",
        "pareto.csv",
        "arch.yaml",
        "result.json",
    }


def test_tables_keep_predicted_and_measured_apart(tmp_path: Path) -> None:
    result = build_result()
    save_result(result, tmp_path)
    with (tmp_path / "trials.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["key"] for row in rows] == [arch.key for arch in ARCHS]
    for row, found in zip(rows, FOUND, strict=True):
        assert float(row["predicted_ratio_of_sums"]) == pytest.approx(found.speedup, rel=1e-5)
        assert (row["levels"], row["nodes"], row["policy"]) == ("2", "3", "static_tree")
    measured = {row["key"]: row["measured_ratio"] for row in rows if row["measured_ratio"]}
    expected = {f.arch.key: f"{f.speedup_measured:g}" for f in result.choice.finalists}
    assert measured == expected
    with (tmp_path / "pareto.csv").open() as stream:
        keys = [row["key"] for row in csv.DictReader(stream)]
    assert keys == [e.arch.key for e in result.pareto]


def test_without_a_winner_there_is_no_arch_file(tmp_path: Path) -> None:
    save_result(build_result(), tmp_path)
    choice = choose_winner(FOUND, lambda finalists: [0.9] * len(finalists))
    save_result(build_result().replace(choice=choice, lift=()), tmp_path)
    assert not (tmp_path / "arch.yaml").exists()
    assert load_result(tmp_path).winner is None


def test_arch_file_is_readable_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "arch.yaml"
    point = Point(arch=DraftArch(tap="0.25", vocab=0.25), policy=StaticTree.chain(3))
    save_point(point, path)
    data = read_yaml(path)
    assert data["policy"] == {
        "kind": "chain",
        "levels": 3,
        "nodes": 3,
        "paths": [[0], [0, 0], [0, 0, 0]],
    }
    assert load_point(path) == point
    write_yaml(path, {**data, "policy": {**data["policy"], "nodes": 5}})
    with pytest.raises(UserError, match=r"policy.nodes = 5, but its paths make 3"):
        load_point(path)
    write_yaml(path, {**data, "policy": {"paths": [[0, 0]]}})
    with pytest.raises(UserError, match=r"node \(0, 0\) needs its parent \(0,\)"):
        load_point(path)
    write_yaml(path, {"arch": {"dept": 1}, "policy": {"paths": []}})
    with pytest.raises(UserError, match="did you mean 'depth'"):
        load_point(path)
    write_yaml(path, {"arch": {}})
    with pytest.raises(UserError, match="keys 'arch' and 'policy'"):
        load_point(path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"schema": "search-result/0"}')
    with pytest.raises(UserError, match="'search-result/0', expected 'search-result/1'"):
        load_result(tmp_path)
