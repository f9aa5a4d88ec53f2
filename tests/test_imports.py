"""Imports run one way, and what needs no torch imports none."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Who may import whom: the rows of the design, section 3.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "space": {"core"},
    "latency": {"core", "space"},
    "targets": {"core", "space"},
    "draft": {"core", "space"},
    "decode": {"core", "space", "latency", "targets", "draft"},
    "supernet": {"core", "space", "draft"},
    "features": {"core", "space", "targets"},
    "replay": {"core", "space", "targets", "draft", "decode", "supernet", "features"},
    "distill": {"core", "space", "targets", "draft", "supernet", "features", "replay"},
    "profiling": {"core", "space", "latency", "targets", "draft", "decode"},
    "search": {"core", "space", "latency"},
    "export": {"core", "space", "draft"},
    "bench": {"core", "space", "latency", "targets", "draft", "decode", "features", "replay"},
    "search_spaces": set(),
    "latency_tables": set(),
}
LIBRARY = set(ALLOWED)
ALLOWED["pipeline"] = set(LIBRARY)
ALLOWED["cli"] = LIBRARY | {"pipeline"}
# Single files that may import more than their package.
ALSO_ALLOWED = {"search/darts.py": {"supernet", "draft"}, "__init__.py": {"decode"}}

WITHOUT_TORCH = ("core", "space", "latency", "search", "cli")
MAY_USE_TORCH = {"search/darts.py"}
# Functions that ask torch which devices there are.
TORCH_FUNCTIONS = {("core/device.py", "resolve_device"), ("core/device.py", "identify_device")}
HEAVY = {"torch", "transformers", "accelerate"}


def source_files() -> list[tuple[str, Path]]:
    """Return each source file with its path inside the installed package."""
    folders = {ROOT / "dreams_nas": ""}
    folders |= {ROOT / name: f"{name}/" for name in ("cli", "search_spaces", "latency_tables")}
    return [
        (f"{prefix}{path.relative_to(folder).as_posix()}", path)
        for folder, prefix in folders.items()
        for path in sorted(folder.rglob("*.py"))
    ]


def package_of(name: str) -> str:
    """Return "core" for "core/files.py" and "pipeline" for "pipeline.py"."""
    return name.split("/")[0].removesuffix(".py")


def imported(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the full names of the modules that `node` may import, in the file called `name`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = ["dreams_nas", *name.split("/")][: -node.level]
            base = ".".join([*here, *([node.module] if node.module else [])])
        # `from dreams_nas import draft` imports a package, too.
        yield from (f"{base}.{alias.name}" for alias in node.names)


def our_imports(name: str, tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        for module in imported(node, name):
            parts = module.split(".")
            if parts[0] == "dreams_nas" and len(parts) > 1 and parts[1] in ALLOWED:
                found.add(parts[1])
    return found - {package_of(name)}


FILES = dict(source_files())


@pytest.mark.parametrize("name", FILES)
def test_imports_point_upwards_only(name: str) -> None:
    package = package_of(name)
    assert package == "__init__" or package in ALLOWED, f"{package} is not in the table"
    allowed = ALLOWED.get(package, set()) | ALSO_ALLOWED.get(name, set())
    wrong = our_imports(name, ast.parse(FILES[name].read_text())) - allowed
    assert not wrong, f"{name} may import {sorted(allowed)}, but imports {sorted(wrong)}"


def heavy_imports(name: str, tree: ast.AST) -> set[str]:
    """Heavy modules imported in a file, the functions that may do so left out."""
    found = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and (name, node.name) in TORCH_FUNCTIONS:
            continue
        found |= {module.split(".")[0] for module in imported(node, name)} & HEAVY
        pending += ast.iter_child_nodes(node)
    return found


def test_packages_without_torch_import_none_even_inside_functions() -> None:
    checked = 0
    for name, path in FILES.items():
        if package_of(name) in WITHOUT_TORCH and name not in MAY_USE_TORCH:
            checked += 1
            assert not heavy_imports(name, ast.parse(path.read_text())), name
    assert checked > 10


def test_importing_them_does_not_load_torch() -> None:
    modules = [
        "dreams_nas." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in FILES
        if package_of(name) in WITHOUT_TORCH and name not in MAY_USE_TORCH
    ]
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_checks_see_what_they_should() -> None:
    relative = ast.parse("from ..draft import model\nfrom .errors import UserError")
    assert our_imports("space/arch.py", relative) == {"draft"}
    assert our_imports("cli/app.py", ast.parse("from dreams_nas import pipeline")) == {"pipeline"}
    hidden = ast.parse("def f():\n    import torch.nn")
    assert heavy_imports("space/arch.py", hidden) == {"torch"}
    assert heavy_imports("core/device.py", hidden) == {"torch"}
    allowed = ast.parse("def resolve_device():\n    import torch")
    assert heavy_imports("core/device.py", allowed) == set()
    assert heavy_imports("core/files.py", allowed) == {"torch"}


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {"dreams_nas"} | {
        "dreams_nas." + name.removesuffix("/__init__.py").replace("/", ".")
        for name in FILES
        if name.endswith("/__init__.py")
    }
    assert set(settings["packages"]) == packages


def test_every_folder_with_sources_is_a_package() -> None:
    for name, path in FILES.items():
        assert (path.parent / "__init__.py").is_file(), name
