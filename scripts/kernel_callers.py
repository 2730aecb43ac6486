"""Which files of the package call which public kernel, read from their source."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import moedraft

KERNELS = "moedraft.kernels"


@cache
def callers(name: str, keyword: str = "", given: bool = True) -> tuple[str, ...]:
    """Files of the package, relative to it, that call this function of `moedraft.kernels` or hand it on.

    keyword: only calls that have this argument; with given=False only those that have it not.
    """
    package = Path(moedraft.__file__).parent
    files = (path for path in sources(package) if "kernels" not in path.relative_to(package).parts)
    found = (path for path in files if calls(path.read_text(encoding="utf-8"), name, keyword, given))
    return tuple(path.relative_to(package).as_posix() for path in found)


def sources(package: Path) -> list[Path]:
    """All Python files of a package, also where its folders are links, as scripts/gpu_check.sh makes them."""
    found = (Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names)
    return sorted(path for path in found if path.suffix == ".py")


def calls(source: str, name: str, keyword: str = "", given: bool = True) -> bool:
    """Whether this source imports the function from `moedraft.kernels` and uses it."""
    if name not in source:
        return False
    tree = ast.parse(source)
    local = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == KERNELS
        for alias in node.names
        if alias.name == name
    }
    if not keyword:
        return any(isinstance(node, ast.Name) and node.id in local for node in ast.walk(tree))
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in local
        and (keyword in {argument.arg for argument in node.keywords}) == given
        for node in ast.walk(tree)
    )
