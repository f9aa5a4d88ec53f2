"""A study: the completed evaluations of one search, on disk, so that a killed search goes on.

One JSON file per draft, named by its key and written atomically: a kill loses at most the draft
that was being evaluated, a draft is never there twice, and several processes may write at once.
"""

from collections.abc import Iterable
from pathlib import Path

from dreams_nas.core.config import Config, build_config
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import read_json, write_json
from dreams_nas.search.objective import Evaluation
from dreams_nas.space.arch import DraftArch

SCHEMA = "search-study/1"


class StudyIdentity(Config):
    """What makes evaluations comparable; a study with another identity is never continued."""

    space: str
    """Hash of the search space, policies included."""
    table: str
    """Hash of the latency table."""
    supernet: str
    """Hash of the supernet's weights."""
    objective: str = ""
    """Hash of what else an evaluation depends on: prompts of both splits, replay settings."""


class Study:
    """Completed evaluations by draft."""

    def __init__(self, identity: StudyIdentity, folder: Path | str | None = None) -> None:
        """Open a study, or begin it.

        Args:
            identity: Of the search to be run.
            folder: Where evaluations are kept; None keeps them in memory only.

        Raises:
            UserError: The folder holds a study of another identity: names field and both values.
        """
        self._trials = None if folder is None else Path(folder) / "trials"
        self._completed: dict[str, Evaluation] = {}
        if folder is None:
            return
        header = Path(folder) / "study.json"
        if header.is_file():
            _require_same(identity, header)
            self._load()
        else:
            write_json(header, {"schema": SCHEMA, **identity.model_dump()})

    def _load(self) -> None:
        assert self._trials is not None
        for path in sorted(self._trials.glob("*.json")):
            if path.name.startswith("."):
                continue  # what a killed process was writing
            evaluation = build_config(Evaluation, read_json(path), str(path))
            self._completed[evaluation.arch.key] = evaluation

    @property
    def num_completed(self) -> int:
        """Drafts evaluated; one that was killed half way does not count."""
        return len(self._completed)

    def get(self, arch: DraftArch) -> Evaluation | None:
        """The evaluation of a draft, if it is completed."""
        return self._completed.get(arch.key)

    def add(self, evaluation: Evaluation) -> None:
        """Keep a completed evaluation."""
        key = evaluation.arch.key
        self._completed[key] = evaluation
        if self._trials is not None:
            path = self._trials / f"{key}.json"
            write_json(path, evaluation.model_dump(mode="json"), indent=None)

    def evaluations(self, archs: Iterable[DraftArch] | None = None) -> list[Evaluation]:
        """Completed evaluations: of these drafts in their order, or all by key."""
        if archs is None:
            return [self._completed[key] for key in sorted(self._completed)]
        return [self._completed[a.key] for a in archs if a.key in self._completed]


def _require_same(identity: StudyIdentity, header: Path) -> None:
    data = read_json(header)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise UserError(
            f"{header}: schema is {found!r}, expected {SCHEMA!r}; search into another folder"
        )
    values = {key: value for key, value in data.items() if key != "schema"}
    stored = build_config(StudyIdentity, values, str(header))
    for name in StudyIdentity.model_fields:
        theirs, ours = getattr(stored, name), getattr(identity, name)
        if theirs != ours:
            raise UserError(
                f"{header}: the study was begun with {name} = {theirs!r}, now {name} = {ours!r}; "
                "its evaluations do not compare, so search into another folder or delete this one"
            )
