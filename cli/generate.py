"""`dreams-nas generate`: one prompt, plainly or with a draft."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreams_nas.core.console import print_json_line, say

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.decode.settings import GenerateConfig


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(
        app,
        "dreams_nas.decode.settings:GenerateConfig",
        keys={"image": "images", "sample": "do_sample", "stop": "stop_strings"},
        replaces=False,
    )
    def generate(
        build: ConfigBuilder,
        flags: RunFlags,
        draft: Annotated[
            str | None,
            typer.Option("--draft", metavar="DIR", help="Draft folder; without it, plainly."),
        ] = None,
        image: Annotated[
            list[str] | None,
            typer.Option("--image", metavar="FILE", help="Image file; may be repeated."),
        ] = None,
        prompt: Annotated[
            str | None, typer.Option("--prompt", metavar="TEXT", help="What to ask.")
        ] = None,
        max_new_tokens: Annotated[
            int | None,
            typer.Option("--max-new-tokens", metavar="N", min=0, help="Longest answer, tokens."),
        ] = None,
        chain: Annotated[
            int | None,
            typer.Option("--chain", metavar="LEVELS", min=1, help="Draft a chain, not the tree."),
        ] = None,
        policy: Annotated[
            str | None,
            typer.Option(
                "--policy", metavar="NAME", help="Not the draft's tree: chain, dynamic, adaptive."
            ),
        ] = None,
        table: Annotated[
            str | None,
            typer.Option("--table", metavar="FILE", help="Latency table; adaptive decides by it."),
        ] = None,
        allow_mismatch: Annotated[
            bool,
            typer.Option("--allow-mismatch", help="Only warn about a table measured elsewhere."),
        ] = False,
        sample: Annotated[
            bool, typer.Option("--sample", help="Draw tokens at random instead of the likeliest.")
        ] = False,
        temperature: Annotated[
            float | None,
            typer.Option("--temperature", metavar="T", help="Divides the logits; 0 is greedy."),
        ] = None,
        top_k: Annotated[
            int | None, typer.Option("--top-k", metavar="K", help="Keep the K likeliest tokens.")
        ] = None,
        top_p: Annotated[
            float | None, typer.Option("--top-p", metavar="P", help="Keep this much probability.")
        ] = None,
        min_p: Annotated[
            float | None,
            typer.Option("--min-p", metavar="P", help="Keep tokens this likely beside the best."),
        ] = None,
        repetition_penalty: Annotated[
            float | None,
            typer.Option("--repetition-penalty", metavar="X", help="Above 1: repeat less."),
        ] = None,
        acceptance: Annotated[
            str | None,
            typer.Option("--acceptance", metavar="RULE", help="match, residual or block."),
        ] = None,
        stop: Annotated[
            list[str] | None,
            typer.Option("--stop", metavar="TEXT", help="Text that ends the answer; repeatable."),
        ] = None,
        trace: Annotated[
            str | None,
            typer.Option("--trace", metavar="FILE", help="Write every round to a JSON file."),
        ] = None,
        json: Annotated[
            bool, typer.Option("--json", help="End with one line of JSON on stdout.")
        ] = False,
    ) -> None:
        """Answer one prompt, token by token, and say what the rounds did (on stderr).

        On a terminal the tokens that the draft proposed are green. Examples:

        dreams-nas generate --image chart.png --prompt "Describe it." --draft runs/demo/export

        dreams-nas generate --prompt "Hello" --sample --temperature 0.7 --top-p 0.9 --seed 3
        """
        config: GenerateConfig = build(
            draft=draft,
            image=image or None,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            chain=chain,
            policy=policy,
            table=table,
            allow_mismatch=allow_mismatch,
            sample=sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            acceptance=acceptance,
            stop=stop or None,
            trace=trace,
        )
        from dreams_nas.core.files import write_json
        from dreams_nas.decode.loading import start

        stream = start(config)
        for piece in stream:
            typer.secho(piece.text, fg="green" if piece.is_accepted else None, nl=False)
        print(flush=True)
        answer = stream.answer
        if config.trace is not None:
            write_json(Path(config.trace), answer.trace())
        say(answer.describe(), flags.quiet)
        if json:
            print_json_line(answer.statistics())
