"""The house rules as a test: who may import what, who may read a clock, and what nobody may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("minedraft", "sim", "backends", "policies")


def sources() -> list[Path]:
    found = []
    for package in PACKAGES:
        # minedraft/{sim,backends,policies} are links to folders that are walked by themselves.
        paths = sorted((ROOT / package).rglob("*.py"))
        found += [path for path in paths if not any(parent.is_symlink() for parent in path.parents)]
    return found


def is_deferred(node: ast.AST) -> bool:
    """Whether importing the file doesn't run this part."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return True
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, *, top_level_only: bool = False) -> list[str]:
    """Modules imported anywhere, or only where importing the file imports them."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.append("." * child.level + (child.module or ""))
                found.extend(f"{child.module}.{alias.name}" for alias in child.names)
            elif not (top_level_only and is_deferred(child)):
                visit(child)

    visit(tree)
    return found


def starts(module: str, *prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


HEAVY = ("simpy", "torch", "transformers", "vllm")
WORLDS = ("minedraft.sim", "minedraft.backends", "minedraft.policies")
FILES = sources()
TREES = {path: ast.parse(path.read_text()) for path in FILES}
IDS = [str(path.relative_to(ROOT)) for path in FILES]


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_every_folder_is_looked_at() -> None:
    assert {part_of(path) for path in FILES} == set(PACKAGES)
    assert len(FILES) > 30


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports(path: Path) -> None:
    """The core knows no world; policies know only views; sim and backends don't know each other."""
    tree, part = TREES[path], part_of(path)
    everywhere = imports(tree)
    for module in everywhere:
        assert not module.startswith("."), f"relative import {module}"
        assert not starts(module, "sim", "backends", "policies"), f"{module}: the import root is minedraft"
    if part == "minedraft":
        for module in imports(tree, top_level_only=True):
            assert not starts(module, *HEAVY, *WORLDS), f"the core imports {module}"
        if "cli" not in path.stem and path.parent.name == "minedraft" and path.stem not in EDGES:
            for module in everywhere:
                assert not starts(module, *HEAVY, *WORLDS), f"{path.name} imports {module} inside a function"
    allowed = ("minedraft.request", "minedraft.sequence", "minedraft.batch", "minedraft.policy")
    for module in everywhere:
        if part == "policies" and starts(module, "minedraft"):
            assert starts(module, *allowed), f"a policy imports {module}"
        if part == "sim":
            assert not starts(module, "minedraft.backends", "torch", "transformers", "vllm"), module
            assert not starts(module, "simpy") or path.name == "backend.py", f"{path.name} imports simpy"
        if part == "backends":
            assert not starts(module, "minedraft.sim", "simpy"), module


# The edges of the core, which build worlds from a configuration; they import them inside functions.
EDGES = ("config", "config_acceptance", "config_cost", "config_drafting", "config_tables", "config_workload")


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_clock_and_randomness(path: Path) -> None:
    """Only backends read a real clock, and nobody draws from the module-level generators."""
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        owner, name = node.value.id, node.attr
        if owner == "random":
            assert name in ("Random", "SystemRandom"), f"line {node.lineno}: random.{name}"
        if part_of(path) in ("sim", "policies") or (part_of(path) == "minedraft" and path.stem in CORE):
            assert owner != "time", f"line {node.lineno}: a clock is read"
            assert (owner, name) not in {("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


CORE = (
    "backend",
    "batch",
    "drafting",
    "engine",
    "journal",
    "kv_cache",
    "memory_pressure",
    "metrics",
    "policy",
    "replay",
    "request",
    "scheduler",
    "sequence",
    "state",
    "verification",
    "waiting",
    "work",
)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_nobody_asks_which_world_this_is(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        for name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")):
            assert not str(name).lower().startswith(("is_simulat", "is_simulation", "in_simulation"))


def test_the_links_join_the_folders() -> None:
    for name in ("sim", "backends", "policies"):
        link = ROOT / "minedraft" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


def test_import_without_any_world() -> None:
    """`import minedraft` works where none of the worlds' packages can be imported."""
    blocked = ("torch", "vllm", "simpy", "transformers", "numpy", "pydantic", "typer", "rich")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import minedraft; print(minedraft.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
