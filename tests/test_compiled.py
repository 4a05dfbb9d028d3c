"""`minedraft compile`: the compiled build decides as the sources do, and a stale one never runs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest
from compiled_copy import command, copy_package, environment

import minedraft
from minedraft import compiled
from minedraft.commands import compile as compile_module
from minedraft.commands.compile import MODULES, NEEDED, compile_command, source_closure
from minedraft.commands.errors import CommandError

ROOT = Path(__file__).parent.parent
COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]

# Small pools and budgets, aborts, failing works and outages: every kind of decision is in the journal.
RUN = """
seed = 7
[scheduler]
max_batch_size = 6
num_speculative_tokens = 4
max_num_batched_tokens = 96
num_target_blocks = 32
num_draft_blocks = 28
max_model_len = 500
[cost]
kind = "linear"
verify_base_s = 0.02
verify_per_seq_s = 0.0005
prefill_base_s = 0.02
prefill_per_token_s = 0.0001
draft_base_s = 0.004
[acceptance]
kind = "beta"
mean = 0.7
concentration = 4.0
[workload]
kind = "synthetic"
num_requests = 150
arrivals = { kind = "poisson", rate = 12.0 }
prompt_lens = { kind = "lognormal", mean = 60, p50 = 40, max_tokens = 300 }
output_lens = { kind = "lognormal", mean = 40, p50 = 30, max_tokens = 200 }
aborts = { probability = 0.1, mean_patience_s = 2.0 }
[faults]
draft_failure_rate = 0.05
verify_failure_rate = 0.02
outages = [{ at_s = 2.0, duration_s = 1.5 }]
pauses = [{ at_s = 4.0, duration_s = 0.3, device = "target" }]
"""


# --- what needs no build


def test_the_closure_of_sources_holds_what_compiled_code_takes_constants_from() -> None:
    found = source_closure(MODULES)
    assert {"__init__.py", "scheduler.py", "kv_cache.py", "sim/__init__.py", "sim/cost.py"} <= set(found)
    assert not [path for path in found if path.startswith(("backends", "commands"))]
    assert all((compiled.PACKAGE / path).is_file() for path in found)


def test_a_build_is_stale_once_the_list_of_modules_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_run_mypyc", lambda *_: None)
    compile_module._build(tmp_path)
    stamped = [line.split()[1] for line in (tmp_path / compiled.STAMP).read_text().splitlines()]
    assert stamped == [*source_closure(MODULES), "commands/compile.py"]


EAGER = ("all", "any", "dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple")


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_lazy_that_mypyc_makes_eager(module: str) -> None:
    """mypyc turns generator expressions into lists (an endless one fills the memory) and drops suspended generators
    without closing them (a file stays open)."""
    path = module.partition(".")[2].replace(".", "/")
    tree = ast.parse((compiled.PACKAGE / f"{path}.py").read_text())
    consumed = [
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (*EAGER, "join")
        for argument in node.args
    ]
    for node in ast.walk(tree):
        assert not isinstance(node, ast.GeneratorExp) or node in consumed, f"line {node.lineno}: use a list, or map"
        if isinstance(node, ast.With | ast.Try):
            held = [inner for inner in ast.walk(node) if isinstance(inner, ast.Yield | ast.YieldFrom)]
            assert not held, f"line {node.lineno}: a generator that holds something open"


def classes(module: str) -> dict[str, list[str]]:
    """Of a module's source, the classes, each with its bases by their full names as far as they are imported."""
    path = compiled.PACKAGE / f"{module.partition('.')[2].replace('.', '/')}.py"
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    own = {node.name: f"{module}.{node.name}" for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {
        own[node.name]: [{**imported, **own}.get(ast.unparse(base), ast.unparse(base)) for base in node.bases]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def test_nothing_that_is_left_out_inherits_from_a_compiled_class() -> None:
    """Python refuses to make an object of a class that does. Protocols, tuples, enums and exceptions allow it."""
    native: dict[str, list[str]] = {}
    for _ in range(2):  # a base may be found after its heirs
        for module in MODULES:
            found = classes(module).items()
            native |= {name: bases for name, bases in found if all(base in native for base in bases)}
    assert "minedraft.sim.backend.SimBackend" in native
    for folder in ("", "sim", "policies", "backends"):  # links, which a recursive glob doesn't follow
        for path in sorted((compiled.PACKAGE / folder).rglob("*.py")):
            module = ".".join(["minedraft", *path.relative_to(compiled.PACKAGE).with_suffix("").parts])
            if module not in MODULES and path.name != "__init__.py":
                heirs = [name for name, bases in classes(module).items() if set(bases) & native.keys()]
                assert not heirs, f"compile {module} too, or leave out what they inherit from"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one source, with a build of it that is up to date (its extension module is never loaded)."""
    monkeypatch.setattr(compiled, "PACKAGE", tmp_path)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "build")
    monkeypatch.delenv(compiled.PURE_PYTHON, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    source = tmp_path / "some.py"
    source.write_text("x = 1\n")
    (tmp_path / "build" / "minedraft").mkdir(parents=True)
    (tmp_path / "build" / "minedraft" / f"some{compiled.SUFFIX}").touch()
    (tmp_path / "build" / compiled.STAMP).write_text(f"{compiled.hash_of(source)} some.py\n")
    return tmp_path


def test_a_build_is_active_only_while_its_sources_are_as_they_were(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build = compiled.activate()
    assert build.active
    assert build.modules == ("minedraft.some",)
    assert build.label == " (compiled)"
    finder = sys.meta_path[0]
    spec = finder.find_spec("minedraft.some")
    assert spec is not None
    assert spec.origin == str(folder / "build" / "minedraft" / f"some{compiled.SUFFIX}")
    assert finder.find_spec("minedraft.other") is None


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_stale_build_is_reported_and_not_used(folder: Path, change: str) -> None:
    if change == "edited":
        (folder / "some.py").write_text("x = 2\n")
    else:
        (folder / "some.py").unlink()
    before = list(sys.meta_path)
    with pytest.warns(compiled.StaleBuildWarning, match=r"some\.py changed since.*minedraft compile"):
        build = compiled.activate()
    assert not build.active
    assert build.changed == ("some.py",)
    assert "STALE" in build.label
    assert sys.meta_path == before


def test_a_build_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.PURE_PYTHON, "1")
    build = compiled.activate()
    assert not build.active
    assert compiled.PURE_PYTHON in build.label


def test_half_a_build_is_none(folder: Path) -> None:
    (folder / "build" / compiled.STAMP).unlink()
    assert compiled.activate() == compiled.Build()


@pytest.mark.parametrize("package", NEEDED)
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "BUILD", compiled.Build())
    monkeypatch.setattr(compile_module, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(CommandError, match=rf"{package} is missing.*minedraft\[compile\]"):
        compile_command(check=False, remove=False)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "BUILD", compiled.Build())
    monkeypatch.setenv("CC", "/nowhere/cc -O2")
    with pytest.raises(CommandError, match=r"no C compiler .*/nowhere/cc"):
        compile_command(check=False, remove=False)


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compile_module, "BUILD", compiled.Build())
    monkeypatch.setattr(compile_module, "_check_tools", lambda: None)
    monkeypatch.setattr(compile_module, "HOME", tmp_path / "file" / "build")
    with pytest.raises(CommandError, match=r"file/build: .*permissions"):
        compile_command(check=False, remove=False)


def test_check_and_remove_exclude_each_other() -> None:
    with pytest.raises(CommandError, match="exclude"):
        compile_command(check=True, remove=True)


# --- a real build, once


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a compiled copy of the package."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"NOT TESTED: the compiled build, for there is no C compiler ({COMPILER})")
    root = tmp_path_factory.mktemp("compiled")
    copy_package(root)
    done = command(root, "compile")
    assert done.returncode == 0, done.stderr
    assert "1/3" in done.stderr
    assert f"{len(MODULES)} compiled modules" in done.stdout
    return root


@pytest.mark.slow
def test_all_modules_come_from_the_build(copy: Path) -> None:
    code = f"import importlib; print(*[importlib.import_module(m).__file__ for m in {MODULES}], sep='\\n')"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, env=environment(copy), cwd=copy, capture_output=True, text=True, check=True)
    for module, file in zip(MODULES, done.stdout.split(), strict=True):
        assert file.endswith(f"/{module.replace('.', '/')}{compiled.SUFFIX}")
        assert Path(file).is_file()
    plain = subprocess.run(
        line, env=environment(copy, plain=True), cwd=copy, capture_output=True, text=True, check=True
    )
    assert all(file.endswith(".py") for file in plain.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_both_builds_write_the_same_journal(copy: Path, mode: str) -> None:
    (copy / "run.toml").write_text(RUN)
    options = ["--mode", mode, "--json", "-"]
    if mode == "ar":
        options += ["--set", "faults.outages=[]"]  # of a drafter, which there is none
    journals = {}
    for plain in (False, True):
        name = f"{mode}-{plain}.jsonl"
        done = command(copy, "simulate", "run.toml", *options, "--journal", name, plain=plain)
        assert done.returncode == 0, done.stderr
        journals[plain] = (copy / name).read_bytes(), done.stdout
        replayed = command(copy, "replay", name, plain=not plain)
        assert replayed.returncode == 0, replayed.stderr
    assert journals[False][0] == journals[True][0]
    assert '"num_preemptions": 0' not in journals[True][1]


@pytest.mark.slow
def test_the_suite_passes_on_the_compiled_build(copy: Path) -> None:
    """Policies are plain Python classes and decide for compiled code; what they may not do is refused likewise."""
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy2(ROOT / "pyproject.toml", copy)
    names = (
        "scheduler scheduler_machine policies metrics replay sim_backend sim_workload shared_pool worlds equivalence"
    )
    files = [f"tests/test_{name}.py" for name in names.split()]
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *files]
    done = subprocess.run(line, env=environment(copy), cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"minedraft {minedraft.__version__} (compiled)" in done.stdout


@pytest.mark.slow
def test_check_stale_and_remove(copy: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(copy / "minedraft", root / "minedraft", symlinks=True)
    assert command(root, "--version").stdout.endswith(" (compiled)\n")
    assert command(root, "compile", "--check").returncode == 0
    assert "up to date" in command(root, "compile").stdout
    source = root / "minedraft" / "kv_cache.py"
    source.write_text(source.read_text() + "\nNEW = 1\n")
    checked = command(root, "compile", "--check")
    assert checked.returncode == 1
    assert "changed since: kv_cache.py" in checked.stderr
    version = command(root, "--version")
    assert "STALE" in version.stdout
    assert "kv_cache.py changed since" in version.stderr
    assert command(root, "compile", "--remove").returncode == 0
    assert not (root / "minedraft" / ".compiled").exists()
    assert command(root, "compile", "--check").returncode == 1
    assert command(root, "--version").stderr == ""
