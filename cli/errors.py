"""Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 130 interrupted; no tracebacks."""

import os
import sys
import traceback
from collections.abc import Callable

from pydantic import ValidationError

from dreams_nas.core.errors import RunError, UserError
from dreams_nas.core.files import is_disk_full

EXIT_RUN_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def run_guarded(function: Callable[[], object]) -> int:
    """Call `function`; turn what it raises into one message on stderr and an exit code.

    `DREAMS_NAS_DEBUG=1` prints the traceback as well.

    Returns:
        The exit code.
    """
    try:
        function()
    except SystemExit as error:
        return _system_exit_code(error)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except (UserError, ValidationError) as error:
        return _fail(f"error: {error}", EXIT_USER_ERROR)
    except RunError as error:
        return _fail(f"failed: {error}", EXIT_RUN_FAILED)
    except MemoryError:
        return _fail("failed: out of memory", EXIT_RUN_FAILED)
    except Exception as error:
        if is_disk_full(error):
            return _fail(f"failed: the disk is full ({error})", EXIT_RUN_FAILED)
        return _fail(
            f"failed: {type(error).__name__}: {error}\n"
            "this was not foreseen; DREAMS_NAS_DEBUG=1 shows where it happened",
            EXIT_RUN_FAILED,
        )
    return 0


def _system_exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return EXIT_RUN_FAILED


def _fail(message: str, code: int) -> int:
    if os.environ.get("DREAMS_NAS_DEBUG") == "1":
        traceback.print_exc()
    print(message, file=sys.stderr, flush=True)
    return code
