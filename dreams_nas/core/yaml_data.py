"""YAML that holds data, with the scalars people expect.

PyYAML follows YAML 1.1, where `1e-4` is text, `off` is false, `010` is eight and a date is an
object. Here scalars follow the core schema of YAML 1.2, and a key given twice is an error.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from dreams_nas.core.errors import UserError
from dreams_nas.core.files import atomic_write_text, read_text

_DIGITS = list("-+0123456789")
_SCALARS = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), _DIGITS),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        [*_DIGITS, "."],
    ),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 scalars and unique keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float, bool)):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes whatever `_Loader` would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# A class without resolvers of its own would share PyYAML's.
_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, _first)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; `where` names its origin in errors.

    Raises:
        UserError: the text is broken, has a key twice or asks for an object.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{where}: is not valid YAML ({problem})") from error


def read_yaml(path: Path | str) -> Any:
    """Read a YAML file.

    Raises:
        UserError: the file is missing or broken; the message names it.
    """
    return parse_yaml(read_text(path), str(path))


def to_yaml(obj: Any) -> str:
    """Return plain data as YAML; short lists stay on one line, keys keep their order."""
    return yaml.dump(
        obj, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=96
    )


def write_yaml(path: Path | str, obj: Any) -> None:
    """Write plain data as YAML, atomically."""
    atomic_write_text(path, to_yaml(obj))
