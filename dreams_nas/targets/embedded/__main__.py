"""Command line of the embedded target: ``python -m dreams_nas.targets.embedded train|evaluate``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dreams_nas.core.console import print_json_line
from dreams_nas.core.errors import RunError, UserError
from dreams_nas.targets.embedded import embedded_target_path

_SHIPPED = embedded_target_path()
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Run folder; a checkpoint in it is continued.")] = Path(
        "runs/embedded"
    ),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of the whole model; 0: as shipped.")] = 0,
    vision_steps: Annotated[
        int, typer.Option(help="Steps of the vision tower; 0: as shipped.")
    ] = 0,
) -> None:
    """Train the target from scratch."""
    import torch

    from dreams_nas.targets.embedded.learning import Schedule
    from dreams_nas.targets.embedded.train import train as run

    torch.set_num_threads(threads)
    shipped = Schedule()
    schedule = Schedule(
        steps=steps or shipped.steps, vision_steps=vision_steps or shipped.vision_steps
    )
    print_json_line({"weights": str(run(out, schedule))})


@app.command()
def evaluate(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = _SHIPPED,
    count: Annotated[int, typer.Option(min=1, help="Answers to generate.")] = 240,
    split: Annotated[str, typer.Option(help="Split of the tables.")] = "score",
    batch: Annotated[int, typer.Option(min=1, help="Answers generated at a time.")] = 24,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Generate whole answers and compare the facts in them with the charts."""
    import torch

    from dreams_nas.targets.embedded.evaluate import evaluate as run

    torch.set_num_threads(threads)
    print_json_line(run(target, split=split, count=count, batch=batch))


def main() -> None:
    """Run the command line: exit code 2 for wrong input, 1 for a failed run."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
