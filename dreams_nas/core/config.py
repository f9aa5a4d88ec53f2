"""Typed configs: frozen, keyword-only, unknown keys refused; one schema for YAML, CLI and docs.

Precedence is flag, then YAML, then default. Every wrong value is reported with its key, the
value, the rule and where it came from, before anything heavy is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticUndefined

from dreams_nas.core.errors import UserError, nearest, unknown_message
from dreams_nas.core.files import hash_json
from dreams_nas.core.yaml_data import parse_yaml, read_yaml, write_yaml


class Config(BaseModel):
    """Base of all configs. A docstring under every field is its description and its CLI help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _no_bool_as_number(cls, data: Any) -> Any:
        """`true` where a number belongs is a slip, though Python counts it as 1."""
        if not isinstance(data, Mapping):
            return data
        # As text it is refused by the field itself, which then is the one that is named.
        return {
            name: str(value).lower() if isinstance(value, bool) and cls._is_number(name) else value
            for name, value in data.items()
        }

    @classmethod
    def _is_number(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        types = set() if field is None else set(_leaf_types(field.annotation))
        return bool not in types and bool(types & {int, float})

    @model_validator(mode="before")
    @classmethod
    def _fill_nested_defaults(cls, data: Any) -> Any:
        """A nested config given in part keeps the rest of this class's default for it."""
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        for name, field in cls.model_fields.items():
            is_single = (
                sum(map(_is_model, _leaf_types(field.annotation))) == 1
            )  # no choice of kinds
            if (
                is_single
                and isinstance(field.default, BaseModel)
                and isinstance(filled.get(name), Mapping)
            ):
                filled[name] = _merged(field.default.model_dump(), filled[name])
        return filled

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated like a new one."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})


C = TypeVar("C", bound=Config)
_MOST_FINDINGS = 20
"""Lines of an error; a table of a thousand wrong numbers is one mistake."""


class ConfigField(NamedTuple):
    """One line of a config's documentation."""

    key: str
    """Dotted, as `--set` takes it."""
    default: str
    """The default as YAML would show it, or "required"."""
    description: str
    """The docstring under the field."""


def load_config(
    cls: type[C],
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> C:
    """Build a config from defaults, a YAML file and flags, later ones winning.

    Args:
        cls: The config class.
        path: YAML file, or None for the defaults alone.
        overrides: What `--set` was given: "key=value" with dotted keys, the value as YAML.
        flags: Values of named flags by dotted key, already typed; None values are "not given".
        names: Name of a flag by dotted key, where it is not the key.

    Raises:
        UserError: names key, value, rule, origin and, for unknown keys, the nearest one.
    """
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    where = str(path) if path is not None else "the command line"
    if path is not None:
        loaded = read_yaml(path)
        if loaded is not None and not isinstance(loaded, dict):
            raise UserError(f"{path}: should hold 'key: value' lines, not {_shown(loaded)}")
        data = loaded or {}
    given = [(*_split_override(text), f"--set {text}") for text in overrides]
    for key, value in (flags or {}).items():
        if value is not None:
            given.append((key, value, f"--{(names or {}).get(key, key).replace('_', '-')}"))
    for key, value, origin in given:
        _set_dotted(data, key, value)
        origins[key] = origin
    return build_config(cls, data, where, origins)


def build_config(
    cls: type[C], data: Mapping[str, Any], where: str, origins: Mapping[str, str] | None = None
) -> C:
    """Validate plain data, e.g. a section of a JSON file, into a config.

    Args:
        cls: The config class.
        data: Plain data.
        where: Names the origin in errors.
        origins: Origins of single dotted keys, where they differ from `where`.

    Raises:
        UserError: as `load_config`.
    """
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise validation_error(error, cls, data, where, origins) from error


def save_config(config: Config, path: Path | str) -> None:
    """Write a config as YAML, atomically; loading it gives an equal config."""
    write_yaml(path, config.model_dump(mode="json"))


def config_hash(config: Config, exclude: set[str] | None = None) -> str:
    """Return a short hash of a config, without the fields that do not change a result."""
    return hash_json(config.model_dump(mode="json", exclude=exclude))


def config_fields(
    cls: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None
) -> list[ConfigField]:
    """Return the documentation of every field, nested configs flattened to dotted keys.

    Args:
        cls: The config class.
        prefix: Put before every key.
        defaults: The instance that a field of this class defaults to, where it is nested.
    """
    rows: list[ConfigField] = []
    for name, field in cls.model_fields.items():
        key = f"{prefix}{name}"
        default = field.get_default(call_default_factory=True, validated_data={})
        default = default if defaults is None else getattr(defaults, name)
        nested = [t for t in _leaf_types(field.annotation) if _is_model(t)]
        if len(nested) == 1 and get_origin(field.annotation) not in (list, tuple, dict):
            inner = default if isinstance(default, BaseModel) else None
            rows += config_fields(nested[0], f"{key}.", inner)
            continue
        shown = "required" if default is PydanticUndefined else _shown(default)
        rows.append(ConfigField(key, shown, " ".join((field.description or "").split())))
    return rows


def validation_error(
    error: ValidationError,
    cls: type[BaseModel],
    data: Any,
    where: str,
    origins: Mapping[str, str] | None = None,
) -> UserError:
    """Say all that pydantic found wrong in our words, one line per finding."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        if len(lines) == _MOST_FINDINGS:
            lines.append(f"{where}: and {error.error_count() - len(lines)} more")
            break
        path = _data_path(data, detail["loc"])
        key = ".".join(str(part) for part in path)
        origin = next(
            (text for k, text in (origins or {}).items() if key == k or key.startswith(f"{k}.")),
            where,
        )
        lines.append(f"{origin}: {_finding(detail, cls, path, key)}")
    return UserError("\n".join(dict.fromkeys(lines)))


def _finding(detail: Any, cls: type[BaseModel], path: tuple[Any, ...], key: str) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        siblings = [n for model in _models_at(cls, path[:-1]) for n in model.model_fields]
        parent = ".".join(str(part) for part in path[:-1])
        return unknown_message("key", path[-1], dict.fromkeys(siblings), parent)
    if kind == "missing":
        return f"the key '{key}' is required, but was not given"
    rule = detail["msg"].removeprefix("Value error, ")
    rule = rule[:1].lower() + rule[1:]
    if kind == "literal_error" and isinstance(value, str):
        choices = detail["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        guess = nearest(value, choices)
        rule += f" (did you mean '{guess}'?)" if guess else ""
    # A rule about the whole config has no key; repeating the whole input would hide the rule.
    return f"{key} = {_shown(value)}: {rule}" if key else rule


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    text = str(value) if value is None or isinstance(value, (int, float, str)) else repr(value)
    text = {"None": "null", "True": "true", "False": "false", "": "''"}.get(text, text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _merged(default: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The default with what was given in its place, nested mappings likewise."""
    merged = {**default, **given}
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(default.get(key), Mapping):
            merged[key] = _merged(default[key], value)
    return merged


def _data_path(data: Any, loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part of pydantic's location that the user wrote: no names of union members."""
    path: list[Any] = []
    for index, part in enumerate(loc):
        is_last = index == len(loc) - 1
        if isinstance(data, Mapping) and (part in data or (is_last and isinstance(part, str))):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, Sequence) and not isinstance(data, str) and isinstance(part, int):
            path.append(part)
            data = data[part] if part < len(data) else None
    return tuple(path)


def _models_at(cls: type[BaseModel], path: tuple[Any, ...]) -> list[type[BaseModel]]:
    """The config classes that may stand at `path` below `cls`."""
    models = [cls]
    for part in path:
        if isinstance(part, str):
            annotations = [
                m.model_fields[part].annotation for m in models if part in m.model_fields
            ]
            models = [t for a in annotations for t in _leaf_types(a) if _is_model(t)]
    return models


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def _leaf_types(annotation: Any) -> Iterator[Any]:
    """The classes inside an annotation, through unions, Annotated and containers."""
    if get_origin(annotation) in (Union, UnionType) or get_args(annotation):
        for part in get_args(annotation):
            yield from _leaf_types(part)
    else:
        yield annotation


def _split_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: should read key=value, e.g. --set seed=1")
    return key.strip(), parse_yaml(value, f"--set {text}")


def _set_dotted(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = data.get(parent)
        if not isinstance(inner, dict):
            inner = data[parent] = {}
        data = inner
    data[last] = value
