"""The artefact of a search: trials, Pareto front, winner, and why."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import atomic_write_text, read_json, write_json
from dreams_nas.core.yaml_data import read_yaml, write_yaml
from dreams_nas.search.objective import Evaluation
from dreams_nas.search.pareto import pareto_front
from dreams_nas.search.study import StudyIdentity
from dreams_nas.search.winner import Lift, WinnerChoice
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import DIMENSIONS
from dreams_nas.space.tree import StaticTree

SCHEMA = "search-result/1"


class Point(Config):
    """A draft and its policy: what finetune, export and bench are given."""

    arch: DraftArch
    """The draft."""
    policy: StaticTree
    """How it drafts."""


class SearchResult(Config):
    """Everything that a search found."""

    identity: StudyIdentity
    """Space, table and supernet it stands on."""
    evaluations: tuple[Evaluation, ...]
    """Every draft evaluated, in the order of the space."""
    choice: WinnerChoice
    """Finalists and winner."""
    lift: tuple[Lift, ...] = ()
    """What each choice of the winner is worth."""
    provenance: dict[str, Any] = Field(default_factory=dict)
    """Command, config, versions, seed and inputs."""

    @property
    def winner(self) -> Point | None:
        """The winner; None means: do not speculate."""
        best = self.choice.winner
        return None if best is None else Point(arch=best.arch, policy=best.tree)

    @property
    def pareto(self) -> list[Evaluation]:
        """Acceptance length against the cost of a round."""
        return pareto_front(self.evaluations)


def save_result(result: SearchResult, folder: Path | str) -> None:
    """Write trials.csv, pareto.csv, arch.yaml (if there is a winner) and, last, result.json.

    `result.json` holds everything; the others are for people and for the next stages.
    """
    folder = Path(folder)
    measured = {f.arch.key: f.speedup_measured for f in result.choice.finalists}
    atomic_write_text(folder / "trials.csv", _csv(result.evaluations, measured))
    atomic_write_text(folder / "pareto.csv", _csv(result.pareto, measured))
    if result.winner is None:
        (folder / "arch.yaml").unlink(missing_ok=True)
    else:
        save_point(result.winner, folder / "arch.yaml")
    write_json(folder / "result.json", {"schema": SCHEMA, **result.model_dump(mode="json")})


def load_result(folder: Path | str) -> SearchResult:
    """Read what `save_result` wrote.

    Raises:
        UserError: Missing or broken file, or another schema.
    """
    path = Path(folder) / "result.json"
    data = read_json(path)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise UserError(f"{path}: schema is {found!r}, expected {SCHEMA!r}; search again")
    values = {key: value for key, value in data.items() if key != "schema"}
    return build_config(SearchResult, values, str(path))


def save_point(point: Point, path: Path | str) -> None:
    """Write architecture and policy as YAML, atomically."""
    write_yaml(
        path, {"arch": point.arch.model_dump(mode="json"), "policy": point.policy.describe()}
    )


def load_point(path: Path | str) -> Point:
    """Read an `arch.yaml`: an architecture and, unless it is plain, the paths of its tree.

    Raises:
        UserError: Missing or broken file, unknown key, or a tree whose stated size is wrong.
    """
    data = read_yaml(path)
    if not isinstance(data, dict) or set(data) != {"arch", "policy"}:
        raise UserError(f"{path}: should hold the keys 'arch' and 'policy'")
    policy = data["policy"]
    if not isinstance(policy, dict) or "paths" not in policy:
        raise UserError(f"{path}: policy should hold the key 'paths', the rank paths of its nodes")
    point = build_config(
        Point, {"arch": data["arch"], "policy": {"paths": policy["paths"]}}, str(path)
    )
    stated = {key: value for key, value in policy.items() if key != "paths"}
    actual = point.policy.describe()
    wrong = [k for k, value in stated.items() if k not in actual or actual[k] != value]
    if wrong:
        raise UserError(
            f"{path}: policy.{wrong[0]} = {stated[wrong[0]]}, but its paths make "
            f"{actual.get(wrong[0], 'no such thing')}; the paths decide, correct or drop the key"
        )
    return point


def _csv(evaluations: Sequence[Evaluation], measured: dict[str, float]) -> str:
    """One row per draft; what was not measured is empty."""
    columns = [
        "key",
        *DIMENSIONS,
        *("levels", "nodes", "policy", "acceptance_length", "round_ms", "draft_prefill_ms"),
        *("plain_ms", "predicted_median", "predicted_p10", "predicted_p90"),
        *("predicted_ratio_of_sums", "measured_ratio", "engines"),
    ]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for e in evaluations:
        policy = e.tree.describe()
        row = {"key": e.arch.key, **e.arch.model_dump(), "engines": " ".join(e.engines)}
        row |= {"levels": policy["levels"], "nodes": policy["nodes"], "policy": policy["kind"]}
        for name in ("acceptance_length", "round_ms", "draft_prefill_ms", "plain_ms"):
            row[name] = f"{getattr(e, name):.6g}"
        for name, value in e.speedup_predicted.quantiles().items():
            row[f"predicted_{name}"] = f"{value:.6g}"
        row["predicted_ratio_of_sums"] = f"{e.speedup:.6g}"
        row["measured_ratio"] = f"{measured[e.arch.key]:.6g}" if e.arch.key in measured else ""
        writer.writerow(row)
    return stream.getvalue()
