"""What people see: tables and one JSON line on stdout, progress and diagnostics on stderr."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dreams_nas.core.files import to_json

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """What `progress` yields."""

    def advance(self, steps: float = 1) -> None:
        """Count `steps` more of the total as done."""

    def describe(self, description: str) -> None:
        """Change the text beside the bar."""


def stderr_console() -> "Console":
    """Return a rich console on stderr; rich is loaded only when something is drawn."""
    from rich.console import Console

    return Console(stderr=True)


def say(message: str, quiet: bool = False) -> None:
    """Print one line of diagnostics on stderr, unless `quiet`."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning on stderr, also when the run is quiet."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class _RichProgress:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, steps: float = 1) -> None:
        self._bar.advance(self._task, steps)

    def describe(self, description: str) -> None:
        self._bar.update(self._task, description=description)


class _NoProgress:
    def advance(self, steps: float = 1) -> None:
        """Draw nothing."""

    def describe(self, description: str) -> None:
        """Draw nothing."""


@contextmanager
def progress(
    description: str, total: float | None = None, quiet: bool = False
) -> Iterator[Progress]:
    """Show a progress bar on stderr while the block runs.

    On a pipe or in a log nothing is redrawn: one line is printed at the start.

    Args:
        description: What is done, in a few words.
        total: Steps until the end, or None when unknown.
        quiet: Show nothing.
    """
    console = None if quiet else stderr_console()
    if console is None or not console.is_terminal:
        say(f"{description} ..." if total is None else f"{description} ({total:g}) ...", quiet)
        yield _NoProgress()
        return
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console) as bar:
        yield _RichProgress(bar, bar.add_task(description, total=total))


def format_cell(value: Any) -> str:
    """Return one cell of a table: what was not measured is "-", floats have 4 digits."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned text table, numbers to the right, the same at any terminal width."""
    cells = [[format_cell(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(headers, *cells, strict=True)]
    is_text = [any(isinstance(row[i], str) for row in rows) for i in range(len(headers))]

    def line(texts: Sequence[str]) -> str:
        padded = [
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(texts, widths, is_text, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) for row in cells)])


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, numbers to the right."""
    is_text = [any(isinstance(row[i], str) for row in rows) for i in range(len(headers))]
    rule = ["---" if left else "---:" for left in is_text]
    cells = [[format_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(headers), rule, *cells])


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], conditions: str | None = None
) -> None:
    """Print a table for people on stdout, under the conditions it was measured in."""
    if conditions:
        print(conditions)
    print(format_table(headers, rows), flush=True)


def print_json_line(obj: Any) -> None:
    """Print `obj` as one line of JSON on stdout; a verb calls this last.

    Raises:
        ValueError: a number is not finite; what was not measured is None.
    """
    print(to_json(obj), flush=True)
