"""Who may import whom: downwards only, and planning needs no torch."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "memo_hf"

# A part may import from the rows above its own. Parts in one row never meet, errors and units apart.
ROWS = [
    {"errors"},
    {"units", "paths"},
    {"arguments"},
    {"config"},
    {"planner"},
    {"forecasting"},
    {"report"},
    {"swap", "allocator"},
    {"profiler"},
    {"optimizer_states"},
    {"layers", "agreement"},
    {"plan_file"},
    {"solving"},
    {"step_forecast", "first_step"},
    {"planning"},
    {"joint"},
    {"patched_stack", "passes", "serving"},
    {"session"},
    {"api", "tracing"},
    {"diagnosis"},
    {"integrations"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
RANK = {part: rank for rank, row in enumerate(ROWS) for part in row}
FORBIDDEN_PARTS = {"layers": {"allocator", "profiler"}}
FORBIDDEN_LIBRARIES = {
    "errors": {"torch", "transformers", "accelerate", "peft"},
    "units": {"torch", "transformers", "accelerate", "peft"},
    "paths": {"torch", "transformers", "accelerate", "peft"},
    "arguments": {"torch", "transformers", "accelerate", "peft"},
    "config": {"torch", "transformers", "accelerate", "peft"},
    "planner": {"torch", "transformers", "accelerate", "peft"},
    "forecasting": {"torch", "transformers", "accelerate", "peft"},
    "report": {"torch", "transformers", "accelerate", "peft"},
    "swap": {"transformers", "accelerate", "peft"},
    "allocator": {"transformers", "accelerate", "peft"},
    "agreement": {"transformers", "accelerate", "peft"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(nodes, path):
    """Dotted names of what the nodes import; relative imports made absolute, `from a import b` counted as a.b."""
    package = ("memo_hf", *path.relative_to(PACKAGE).with_suffix("").parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def at_import(tree):
    """The nodes that run when the module is imported: not the bodies of functions, not `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (part for child in node.orelse for part in (child, *at_import(child)))
            continue
        yield node
        yield from at_import(node)


def faults(source, path):
    part = part_of(path)
    for name in imported_modules(ast.walk(ast.parse(source)), path):
        library, *rest = name.split(".")
        if library in FORBIDDEN_LIBRARIES.get(part, ()):
            yield f"{part} imports {name}"
        if library != "memo_hf" or not rest or rest[0] not in RANK:
            continue  # `memo_hf` itself and its lazy public names belong to no part
        target = rest[0]
        if target != part and RANK[target] >= RANK[part] or target in FORBIDDEN_PARTS.get(part, ()):
            yield f"{part} imports {name}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path):
    assert part_of(path) in RANK, f"{path} belongs to no known part; give it a place in ROWS"
    assert not list(faults(path.read_text(), path))


def test_planning_reaches_no_torch():
    """Follows module-level imports from the command line and its subcommands, which `memo-hf plan` loads."""
    reached, todo = {}, dict.fromkeys([PACKAGE / "cli.py", *PACKAGE.glob("commands/*.py")], "the command line")
    while todo:
        path, how = todo.popitem()
        if path in reached or not path.is_file():
            continue
        reached[path] = how
        for name in imported_modules(at_import(ast.parse(path.read_text())), path):
            library, *rest = name.split(".")
            assert library not in {"torch", "transformers", "accelerate", "peft", "datasets"}, f"{path} imports {name}"
            if library == "memo_hf":
                for depth in range(len(rest) + 1):
                    module = PACKAGE.joinpath(*rest[:depth])
                    todo |= {module.with_suffix(".py"): path, module / "__init__.py": path}


@pytest.mark.parametrize(
    "place, source, fault",
    [
        ("planner/plan.py", "import torch", "planner imports torch"),
        ("planner/plan.py", "def f():\n    from torch import nn", "planner imports torch.nn"),
        (
            "planner/plan.py",
            "from memo_hf.forecasting.memory import peak",
            "planner imports memo_hf.forecasting.memory.peak",
        ),
        ("swap/engine.py", "from ..allocator import native", "swap imports memo_hf.allocator.native"),
        ("swap/engine.py", "from memo_hf import allocator", "swap imports memo_hf.allocator"),
        ("layers/chunked.py", "import memo_hf.allocator.meter", "layers imports memo_hf.allocator.meter"),
        ("allocator/planned.py", "import transformers", "allocator imports transformers"),
        ("cli.py", "from memo_hf import api", None),
        ("swap/engine.py", "from . import storage\nimport torch", None),
    ],
)
def test_the_check_itself(place, source, fault):
    found = list(faults(source, PACKAGE / place))
    assert (len(found) == 1 and found[0].startswith(fault)) if fault else not found


def test_the_check_knows_what_runs_at_import():
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
    source += "class C:\n    import c\n    def f(self):\n        import d\n"
    names = set(imported_modules(at_import(ast.parse(source)), PACKAGE / "cli.py"))
    assert names == {"b", "c"}
