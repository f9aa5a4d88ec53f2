"""Exchange two paths in one step, which Python's os module does not offer (Linux renameat2)."""

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def swap_paths(first: Path, second: Path) -> bool:
    """Exchange two existing paths of one file system, atomically.

    Returns:
        False, with nothing changed, where system or file system cannot do it.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    result: int = rename(
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(first)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(second)),
        ctypes.c_uint(_RENAME_EXCHANGE),
    )
    return result == 0
