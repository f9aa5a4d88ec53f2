"""Atomic writes: the old state or the new one, at any failure."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dreams_nas.core import files
from dreams_nas.core.errors import RunError, UserError


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_text_bytes_and_json_come_back(tmp_path: Path) -> None:
    files.atomic_write_text(tmp_path / "a" / "b.txt", "naïve\n")
    files.atomic_write_bytes(tmp_path / "c", b"\x00\xff")
    files.write_json(tmp_path / "d.json", {"z": [1, 2.5], "a": None, "p": Path("x/y")})
    assert files.read_text(tmp_path / "a" / "b.txt") == "naïve\n"
    assert (tmp_path / "c").read_bytes() == b"\x00\xff"
    assert files.read_json(tmp_path / "d.json") == {"z": [1, 2.5], "a": None, "p": "x/y"}
    assert list(files.read_json(tmp_path / "d.json")) == ["z", "a", "p"]
    assert names(tmp_path) == ["a", "c", "d.json"]


def test_a_failing_writer_leaves_the_old_file_and_no_remains(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    files.atomic_write_text(target, "old")

    def write_half(temporary: Path) -> None:
        assert (temporary.suffix, temporary.parent) == (".safetensors", tmp_path)
        temporary.write_text("half of the n")
        raise KeyError("writer")

    with pytest.raises(KeyError), files.atomic_path(target) as temporary:
        write_half(temporary)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["model.safetensors"]


def test_a_folder_is_replaced_as_a_whole_and_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "draft"
    with files.atomic_dir(target) as temporary:
        (temporary / "old.json").write_text("1")
        assert not target.exists()
    with files.atomic_dir(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "new.json").write_text("2")
        assert names(target) == ["old.json"]
    assert names(target) == ["sub"]
    assert names(tmp_path) == ["draft"]


def test_a_failing_folder_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "draft"
    with files.atomic_dir(target) as temporary:
        (temporary / "old.json").write_text("1")

    def write_half(folder: Path) -> None:
        (folder / "new.json").write_text("2")
        raise KeyError("writer")

    with pytest.raises(KeyError), files.atomic_dir(target) as temporary:
        write_half(temporary)
    assert names(target) == ["old.json"]
    assert names(tmp_path) == ["draft"]


def test_folders_are_replaced_where_they_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "swap_paths", lambda new, old: False)
    target = tmp_path / "draft"
    for name in ("first", "second"):
        with files.atomic_dir(target) as temporary:
            (temporary / name).write_text("x")
    assert names(target) == ["second"]
    assert names(tmp_path) == ["draft"]


def test_a_kill_between_two_renames_is_repaired(tmp_path: Path) -> None:
    aside = tmp_path / ".old-draft"
    aside.mkdir()
    (aside / "old.json").write_text("1")
    files.recover_dir(tmp_path / "draft")
    assert names(tmp_path / "draft") == ["old.json"]
    assert names(tmp_path) == ["draft"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with (
        pytest.raises(UserError, match="is a file, but a folder"),
        files.atomic_dir(tmp_path / "out"),
    ):
        pass
    with pytest.raises(UserError, match="cannot write here"):
        files.atomic_write_text(tmp_path / "out" / "x.json", "{}")
    assert (tmp_path / "out").read_text() == "mine"


def test_kill_9_in_a_write_keeps_the_old_file_and_the_next_write_sweeps(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    files.write_json(target, {"step": 1})
    code = (
        "import sys, os, signal\n"
        "from dreams_nas.core.files import atomic_path, atomic_dir\n"
        "with atomic_dir(sys.argv[1] + '.d') as folder, atomic_path(sys.argv[1]) as path:\n"
        "    path.write_text('{\"step\": ')\n"
        "    (folder / 'x').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert files.read_json(target) == {"step": 1}
    assert len(names(tmp_path)) == 3
    files.write_json(target, {"step": 2})
    with files.atomic_dir(tmp_path / "state.json.d"):
        pass
    assert names(tmp_path) == ["state.json", "state.json.d"]


def test_the_temporary_file_of_a_living_process_is_not_swept(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    with files.atomic_path(target) as outer:
        outer.write_text("outer")
        files.atomic_write_text(target, "inner")
        assert outer.exists()
    assert target.read_text() == "outer"


class SafetensorError(Exception):
    """Like the one of safetensors, which is no OSError."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("writer", [files.atomic_path, files.atomic_dir])
def test_a_full_disk_is_a_run_error_that_names_the_path(
    tmp_path: Path, error: Exception, writer: object
) -> None:
    with pytest.raises(RunError, match=r"shard.*the disk is full"), writer(tmp_path / "shard"):  # type: ignore[operator]
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O"), SafetensorError("bad header")])
def test_other_errors_keep_their_type(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), files.atomic_path(tmp_path / "x"):
        raise error


def test_json_refuses_what_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert names(tmp_path) == []
    (tmp_path / "y.json").write_text('{"a": NaN}')
    with pytest.raises(UserError, match=r"y\.json: is not valid JSON \(NaN"):
        files.read_json(tmp_path / "y.json")


def test_reading_names_the_file_and_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        files.read_json(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"a": 1')
    with pytest.raises(UserError, match=r"cut\.json: is not valid JSON .*line 1 column"):
        files.read_json(tmp_path / "cut.json")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(UserError, match=r"image\.png: is not UTF-8 text"):
        files.read_text(tmp_path / "image.png")
    with pytest.raises(UserError, match="cannot be read"):
        files.read_text(tmp_path)


def test_json_hash_ignores_key_order_only() -> None:
    base = files.hash_json({"a": 1, "b": [1, 2]})
    assert base == files.hash_json({"b": [1, 2], "a": 1})
    assert base != files.hash_json({"a": 1, "b": [2, 1]})
    assert len(base) == 16


def test_file_hash_follows_contents_and_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(b"1")
    first = files.file_hash(tmp_path / "one")
    assert first == files.file_hash(tmp_path / "two")
    (tmp_path / "two" / "a.bin").rename(tmp_path / "two" / "b.bin")
    assert first != files.file_hash(tmp_path / "two")
    (tmp_path / "one" / "a.bin").write_bytes(b"2")
    assert first != files.file_hash(tmp_path / "one")
    with pytest.raises(UserError, match="cannot be read"):
        files.file_hash(tmp_path / "none")


def test_free_space_is_checked_before_writing(tmp_path: Path) -> None:
    files.check_free_space(tmp_path / "not" / "yet", 1, "the feature store")
    with pytest.raises(
        UserError, match=r"the feature store needs 1000000\.0 TB, but only .* are free"
    ):
        files.check_free_space(tmp_path / "not" / "yet", 10**18, "the feature store")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1_500_000, "1.5 MB"), (3 * 10**9, "3.0 GB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert files.format_bytes(size) == text
