"""Atomic writes: a kill at any byte leaves the last complete state, never half of a new one.

Everything is written under a temporary name in the target's own folder, flushed to the disk and
renamed over the target. Temporary names carry host and process, so that the remains of a killed
process are swept by the next write to the same path.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dreams_nas.core.errors import RunError, UserError
from dreams_nas.core.swap import swap_paths

_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NUM_HASH_CHARS = 16


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, from Python or from a native library, means that the disk is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL_DISK
    # safetensors reports its own error type, with the system's number only in the text.
    return any(f"os error {code}" in str(error) for code in _FULL_DISK)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn the ways in which the disk refuses a write into errors that name the path."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{path}: no permission to write; choose another place") from error
    except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        raise UserError(f"{path}: cannot write here ({error.strerror})") from error
    except Exception as error:
        if is_disk_full(error):
            raise RunError(
                f"{path}: the disk is full; nothing was replaced, free some space and run again"
            ) from error
        raise


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path to write a file to; it becomes `path` when the block succeeds.

    The suffix is kept, since some writers choose the format by it. After an exception the old
    file stands untouched and the temporary one is gone.

    Raises:
        RunError: the disk is full.
        UserError: the place cannot be written to.
    """
    path = Path(path)
    with _write_errors(path):
        temporary = _temporary(path)
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path | str) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; it becomes the folder `path` on success.

    What `path` held before is replaced as a whole, and only at the end: readers see the old
    folder or the new one. After an exception the old one stands untouched.

    Raises:
        RunError: the disk is full.
        UserError: the place cannot be written to.
    """
    path = Path(path)
    with _write_errors(path):
        recover_dir(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: is a file, but a folder is to be written here")
        temporary = _temporary(path)
        temporary.mkdir()
        try:
            yield temporary
            _sync_tree(temporary)
            _replace_dir(temporary, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def recover_dir(path: Path | str) -> None:
    """Put back the folder that a kill between the two renames of `atomic_dir` had set aside.

    Only needed on file systems that cannot exchange two folders in one step.
    """
    path = Path(path)
    aside = _aside(path)
    if aside.is_dir():
        if path.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, path)


def _aside(path: Path) -> Path:
    return path.with_name(f".old-{path.name}")


def _replace_dir(new: Path, path: Path) -> None:
    """Rename `new` to `path`; an old folder there ends under the name `new`."""
    if not path.exists():
        os.rename(new, path)
    elif not swap_paths(new, path):
        aside = _aside(path)
        os.rename(path, aside)
        os.rename(new, path)
        shutil.rmtree(aside)


def _temporary(path: Path) -> Path:
    """Return an unused temporary sibling of `path`, after sweeping those of dead processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = f".tmp-{_HOST}-"
    for remains in path.parent.glob(f"{start}*"):
        pid, _, rest = remains.name.removeprefix(start).partition("-")
        same_target = rest.partition("-")[2] == path.name
        if same_target and pid.isdecimal() and not _is_alive(int(pid)):
            if remains.is_dir():
                shutil.rmtree(remains, ignore_errors=True)
            else:
                remains.unlink(missing_ok=True)
    return path.with_name(f"{start}{os.getpid()}-{secrets.token_hex(4)}-{path.name}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems refuse to flush a folder; its files were flushed one by one.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for entry in folder.rglob("*"):
        if not entry.is_symlink():
            _sync(entry)
    _sync(folder)


def atomic_write_bytes(path: Path | str, data: bytes) -> None:
    """Write `data` to `path`, atomically; parent folders are made."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: Path | str, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically; parent folders are made."""
    atomic_write_bytes(path, text.encode("utf-8"))


def _plain(value: Any) -> Any:
    """What json cannot write by itself: paths, configs, numpy and torch scalars and arrays."""
    if isinstance(value, Path):
        return value.as_posix()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON data: {value!r}")


def to_json(obj: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return `obj` as standard JSON; NaN and infinity, which JSON lacks, are refused.

    Raises:
        ValueError: a number is not finite; what was not measured is None, never NaN.
    """
    return json.dumps(
        obj, indent=indent, sort_keys=sort_keys, allow_nan=False, ensure_ascii=False, default=_plain
    )


def write_json(
    path: Path | str, obj: Any, *, indent: int | None = 2, sort_keys: bool = False
) -> None:
    """Write `obj` as JSON, atomically. Keys keep their order unless `sort_keys`."""
    atomic_write_text(path, to_json(obj, indent=indent, sort_keys=sort_keys) + "\n")


def read_text(path: Path | str) -> str:
    """Read a UTF-8 file.

    Raises:
        UserError: the file is missing, unreadable or no text.
    """
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def read_json(path: Path | str) -> Any:
    """Read JSON.

    Raises:
        UserError: the file is missing or broken; the message names it and the place in it.
    """
    try:
        return json.loads(read_text(path), parse_constant=_refuse_constant)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: is not valid JSON ({error})") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def hash_json(obj: Any) -> str:
    """Return a short sha256 (16 hex digits) of JSON data, whatever the order of its keys."""
    return hash_bytes(to_json(obj, sort_keys=True).encode("utf-8"))


def hash_bytes(data: bytes) -> str:
    """Return a short sha256 (16 hex digits) of `data`."""
    return hashlib.sha256(data).hexdigest()[:_NUM_HASH_CHARS]


def file_hash(path: Path | str) -> str:
    """Return a short sha256 (16 hex digits) of a file, or of a folder's names and contents.

    Raises:
        UserError: there is nothing at `path`.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(entry for entry in path.rglob("*") if entry.is_file())
        return hash_json({file.relative_to(path).as_posix(): file_hash(file) for file in files})
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:_NUM_HASH_CHARS]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def require_own_folder(folder: Path, names: Collection[str]) -> None:
    """Refuse to replace a folder that holds anything but what was written there before.

    Raises:
        UserError: Names what is in the way.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, and a folder is to be written there")
    found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if others := sorted(set(found) - set(names)):
        raise UserError(
            f"{folder}: holds other files ({', '.join(others[:3])}), and it would be replaced as a "
            "whole; choose an empty or a new folder"
        )


def require_writable(path: Path | str) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold.

    Raises:
        UserError: A folder of that name, or one above it that is missing, a file or read-only.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the name of a file")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"{path}: {above} is a file, not a folder")
    if not os.access(above, os.W_OK):
        raise UserError(f"{path}: {above} may not be written; choose another place")


def check_free_space(path: Path | str, needed_bytes: int, what: str) -> None:
    """Refuse to start writing `what` under `path` when the disk cannot hold it.

    Raises:
        UserError: fewer than `needed_bytes` are free; the message has both numbers.
    """
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{path}: {what} needs {format_bytes(needed_bytes)}, but only "
            f"{format_bytes(free_bytes)} are free; free some space or choose another --out"
        )


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, in decimal units: 1,500,000 is "1.5 MB"."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
