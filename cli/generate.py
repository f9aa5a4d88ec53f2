"""`dreams-nas generate`: one prompt, plainly or with a draft."""

from typing import Annotated

import typer

from dreams_nas.core.config import Config
from dreams_nas.core.console import print_json_line, say

from .options import RunFlags, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.bench.config:GenerateConfig")
    def generate(
        config: Config,
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
        json: Annotated[
            bool, typer.Option("--json", help="End with one line of JSON on stdout.")
        ] = False,
    ) -> None:
        """Answer one prompt and say what the rounds did (on stderr)."""
        from dreams_nas.bench.config import GenerateConfig, with_given
        from dreams_nas.bench.generate import generate as run

        assert isinstance(config, GenerateConfig)
        answer = run(
            with_given(
                config,
                draft=draft,
                images=tuple(image) if image else None,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                chain=chain,
            )
        )
        print(answer.text, flush=True)
        say(answer.describe(), flags.quiet)
        if json:
            print_json_line(answer.statistics())
