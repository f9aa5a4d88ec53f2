"""The flags every verb shares, and how a config is built from them: flag, YAML, default."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from typer.core import TyperCommand

from dreams_nas.core.config import Config, config_fields, load_config
from dreams_nas.core.console import warn
from dreams_nas.core.errors import UserError

C = TypeVar("C", bound=Config)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with config keys.")
]
ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="YAML file with config keys.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One config key, dotted; may be repeated."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder that the result is written to.")
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", metavar="NAME", help="Target: `embedded` or a Hugging Face folder."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu or cuda:N.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="float64, float32, bfloat16 or float16."),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads per operation.")
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", min=0, help="Root seed; every stage derives its own."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress, warnings only.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Redo what is finished, replace what is there.")
]

_SHARED: dict[str, tuple[Any, Any]] = {
    "config": (ConfigOption, None),
    "set": (SetOption, None),
    "out": (OutOption, None),
    "target": (TargetOption, None),
    "device": (DeviceOption, None),
    "dtype": (DtypeOption, None),
    "threads": (ThreadsOption, None),
    "seed": (SeedOption, None),
    "quiet": (QuietOption, False),
    "force": (ForceOption, False),
}
_CONFIG_FLAGS = ("out", "target", "device", "dtype", "threads", "seed")
"""Shared flags that are config keys."""


ConfigBuilder = Callable[..., Any]
"""Builds the config of a verb from the command line and the values of its own flags."""


class RunFlags(NamedTuple):
    """Shared flags that change how a verb runs, but not its result."""

    quiet: bool
    force: bool


def config_from_flags(
    cls: type[C],
    config: Path | None = None,
    settings: list[str] | None = None,
    keys: Mapping[str, str] | None = None,
    **flags: Any,
) -> C:
    """Build a config: a flag wins over the YAML file, the file over the default.

    Args:
        cls: The config class.
        config: What `--config` was given.
        settings: What `--set` was given.
        keys: Dotted config key by flag name, where the two differ.
        flags: Named flags; None or False means not given. One that the class has no key for is
            warned about, since it changes nothing.

    Raises:
        UserError: as `load_config`, or when a flag and `--set` contradict each other.
    """
    known = {field.key for field in config_fields(cls)}
    set_keys = [text.partition("=")[0].strip() for text in settings or []]
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for flag, value in flags.items():
        key = (keys or {}).get(flag, flag)
        shown = f"--{flag.replace('_', '-')}"
        if value is None or value is False:
            continue
        if key not in known:
            warn(f"{shown} is not used here")
            continue
        for set_key in set_keys:
            if f"{set_key}.".startswith(f"{key}."):
                raise UserError(f"{shown} and --set {set_key}=... are both given; leave one out")
        given[key] = value.as_posix() if isinstance(value, Path) else value
        names[key] = flag
    return load_config(cls, config, settings or [], given, names)


def verb(
    app: typer.Typer,
    config_class: str,
    *,
    name: str | None = None,
    keys: Mapping[str, str] | None = None,
    config_argument: bool = False,
    replaces: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a verb with the shared flags.

    The function is called as `function(build, flags, **extra)`: what builds the config from the
    command line, the `RunFlags`, and the further parameters it declares as Typer options or
    arguments. It calls `build(flag=value, ...)` with those that are config keys.

    Args:
        app: The Typer app.
        config_class: "module:Class", imported only when the verb runs or its help is shown.
        name: Name of the verb, by default the function's.
        keys: Dotted config key by flag, where the two differ.
        config_argument: Take the YAML file as `VERB CONFIG.yaml`, too.
        replaces: Whether `--force` changes what the verb does.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        extra = list(inspect.signature(function).parameters.values())[2:]
        shared = {flag: x for flag, x in _SHARED.items() if replaces or flag != "force"}
        if config_argument:
            shared = {"config_file": (ConfigArgument, None), **shared}

        def command(**values: Any) -> None:
            positional = values.pop("config_file", None)
            if positional is not None and values["config"] is not None:
                raise UserError("CONFIG.yaml and --config are both given; leave one out")

            def build(**own: Any) -> Config:
                return config_from_flags(
                    _load_class(config_class),
                    positional or values["config"],
                    values["set"],
                    keys,
                    **{flag: values[flag] for flag in _CONFIG_FLAGS},
                    **own,
                )

            flags = RunFlags(values["quiet"], values.get("force", False))
            function(build, flags, **{p.name: values[p.name] for p in extra})

        # Typer reads the signature; written out in each verb it would be the same ten lines.
        parameters = [
            inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for p, (kind, default) in shared.items()
        ]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in extra]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        app.command(name or function.__name__, cls=_help_class(config_class))(command)
        return function

    return decorate


def _load_class(config_class: str) -> type[Config]:
    module, _, attribute = config_class.partition(":")
    loaded = getattr(importlib.import_module(module), attribute)
    assert issubclass(loaded, Config), f"{config_class} is no Config"
    return loaded


@cache
def _help_class(config_class: str) -> type[TyperCommand]:
    """A command whose `--help` ends with the keys of its config, from the docstrings there."""

    class ConfigCommand(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            rows = [
                (field.key, f"{field.description} [default: {field.default}]")
                for field in config_fields(_load_class(config_class))
            ]
            with formatter.section("Config keys (YAML and --set)"):
                formatter.write_dl(rows)

    return ConfigCommand
