"""`dreams-nas collect`: the target answers prompts, its features are recorded."""

from typing import TYPE_CHECKING

import typer

from .options import ConfigBuilder, RunFlags, verb

if TYPE_CHECKING:
    from dreams_nas.features.config import CollectVerbConfig
    from dreams_nas.features.store import Manifest


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @verb(app, "dreams_nas.features.config:CollectVerbConfig")
    def collect(build: ConfigBuilder, flags: RunFlags) -> None:
        """Let the target answer prompts itself and record its tapped hidden states."""
        from dreams_nas.core.console import print_json_line
        from dreams_nas.core.seeds import derive_seed
        from dreams_nas.features.collect import collect as collect_features
        from dreams_nas.features.conversations import load_conversations, split_of
        from dreams_nas.targets.loading import load_placed

        config: CollectVerbConfig = build()
        seed = derive_seed(config.seed, f"data-{split_of(config.data)}")
        conversations = load_conversations(config.data, config.count, seed)
        target = load_placed(config)
        store = collect_features(
            target,
            conversations,
            config.collect,
            config.out,
            split=split_of(config.data),
            seed=config.seed,
            overwrite=flags.force,
            quiet=flags.quiet,
        )
        _print_summary(store.manifest)
        print_json_line(
            {
                "out": config.out,
                "num_recordings": len(store),
                "num_skipped": len(store.manifest.skipped),
                "num_prompt_tokens": store.manifest.num_prompt_tokens,
                "num_answer_tokens": store.manifest.num_answer_tokens,
                "num_bytes": store.manifest.num_bytes,
                "key_hash": store.key_hash,
            }
        )


def _print_summary(manifest: "Manifest") -> None:
    from dreams_nas.core.console import print_table
    from dreams_nas.core.files import format_bytes

    print_table(
        ("recordings", "skipped", "prompt tokens", "answer tokens", "image tokens", "size"),
        [
            (
                len(manifest.ids),
                len(manifest.skipped),
                manifest.num_prompt_tokens,
                manifest.num_answer_tokens,
                manifest.num_image_tokens,
                format_bytes(manifest.num_bytes),
            )
        ],
        f"{manifest.target.name}, layers {list(manifest.target_layer_ids)}, {manifest.dtype}",
    )
