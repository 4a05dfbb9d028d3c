"""`minedraft compile`: builds the hot modules of the installed package as extension modules, with mypyc.

The sources stay as they are and run uncompiled; `minedraft.compiled` decides at import which of the two runs.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from minedraft import BUILD
from minedraft.commands import mypyc_build
from minedraft.commands.errors import FAILED_CHECK, CommandError, unusable_file
from minedraft.compiled import FOLDER, HOME, PACKAGE, PURE_PYTHON, STAMP, find_build, hash_of

# What runs once per step or request. Left out although hot: modules whose classes others inherit from, which a compiled
# class doesn't allow (policies, cost and acceptance models), and generators that hold a file open
# (`journal`), which compiled code doesn't close when they are dropped. tests/test_compiled.py says what else is asked.
MODULES: Final = (
    "minedraft.backend",
    "minedraft.batch",
    "minedraft.drafting",
    "minedraft.engine",
    "minedraft.ingestion",
    "minedraft.kv_cache",
    "minedraft.memory_pressure",
    "minedraft.metrics",
    "minedraft.policy",
    "minedraft.recorder",
    "minedraft.request",
    "minedraft.scheduler",
    "minedraft.scheduler_config",
    "minedraft.sequence",
    "minedraft.state",
    "minedraft.steady",
    "minedraft.verification",
    "minedraft.waiting",
    "minedraft.work",
    "minedraft.sim.arrivals",
    "minedraft.sim.backend",
    "minedraft.sim.beta_fates",
    "minedraft.sim.fates",
    "minedraft.sim.pearl",
    "minedraft.sim.workload",
)
NEEDED: Final = ("mypy", "mypyc", "setuptools")
REMEDY: Final = "install it with: pip install 'minedraft[compile]'"
LOG_LINES: Final = 12  # shown of a build that fails


def compile_command(check: bool, remove: bool) -> None:
    """Build, or remove what was built.

    Args:
        check: only say what there is; `FAILED_CHECK` unless a build that is up to date is there.
        remove: only remove what was built for this interpreter.

    Raises:
        CommandError: it can't be done here, with the remedy.
    """
    if check and remove:
        raise CommandError("--check and --remove exclude each other; drop one of them")
    if check:
        _check()
    elif remove:
        _remove()
    elif BUILD.modules and not BUILD.changed:
        typer.echo(f"up to date: {_described(BUILD.modules)}")
    else:
        _compile()


def _described(modules: Iterable[str]) -> str:
    return f"{sum(name.startswith('minedraft.') for name in modules)} compiled modules in {FOLDER}"


def _check() -> None:
    if not BUILD.modules:
        raise CommandError("nothing is compiled; `minedraft compile` does it", FAILED_CHECK)
    if BUILD.changed:
        changed = ", ".join(BUILD.changed)
        raise CommandError(f"the build is stale and not used; changed since: {changed}", FAILED_CHECK)
    typer.echo(f"up to date: {_described(BUILD.modules)}")


def _remove() -> None:
    if not FOLDER.exists():
        typer.echo("nothing is compiled")
        return
    try:
        shutil.rmtree(FOLDER)
        if not any(HOME.iterdir()):
            HOME.rmdir()
    except OSError as error:
        raise unusable_file(error) from error
    typer.echo(f"removed {FOLDER}; minedraft runs as plain Python")


def _compile() -> None:
    _check_tools()
    try:
        HOME.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=HOME) as name:
            new = Path(name)
            new.chmod(0o755)
            _build(new)
            shutil.rmtree(FOLDER, ignore_errors=True)
            new.rename(FOLDER)
    except OSError as error:
        raise unusable_file(error) from error
    _try_out()
    build = find_build()
    typer.echo(f"done: {_described(build.modules)}")


def _check_tools() -> None:
    """Say what is missing before anything is begun."""
    for package in NEEDED:
        if find_spec(package) is None:
            raise CommandError(f"this needs mypyc ({package} is missing); {REMEDY}")
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    program = shlex.split(compiler)[0]
    if shutil.which(program) is None:
        raise CommandError(f"no C compiler ({program}); install one, such as gcc, or name one in the variable CC")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise CommandError(f"{header} is missing; install Python's headers, such as the package python3-dev")


def _build(output: Path) -> None:
    """Compile copies of the sources in a scratch folder, so that nothing else is left in the package."""
    stamp = []
    with tempfile.TemporaryDirectory(prefix="minedraft-compile-") as scratch:
        for path in source_closure(MODULES):
            copy = Path(scratch, "minedraft", path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PACKAGE / path, copy)
            stamp.append(f"{hash_of(copy)} {path}\n")
        builder = Path(__file__)  # whose list of modules may change
        stamp.append(f"{hash_of(builder)} {builder.relative_to(PACKAGE)}\n")
        files = [str(Path("minedraft", _path_of(module))) for module in MODULES]
        _run_mypyc(Path(scratch), output, files)
    (output / STAMP).write_text("".join(stamp), encoding="utf-8")


def _run_mypyc(scratch: Path, output: Path, files: list[str]) -> None:
    typer.echo(f"1/3 checking types and translating {len(files)} modules to C", err=True)
    command = [sys.executable, "-P", mypyc_build.__file__, str(output), *files]
    log: list[str] = []
    with subprocess.Popen(
        command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.rstrip() == mypyc_build.TRANSLATED:
                typer.echo("2/3 compiling the C (a minute or so)", err=True)
            else:
                log.append(line.rstrip())
    if process.returncode:
        typer.echo("\n".join(log[-LOG_LINES:]), err=True)
        raise CommandError("the build failed, see above; minedraft runs as plain Python")


def _try_out() -> None:
    """Import all that was built in a fresh interpreter; remove it if that fails."""
    typer.echo("3/3 trying it out", err=True)
    code = f"import importlib, minedraft; assert minedraft.BUILD.active\nfor m in {MODULES}: importlib.import_module(m)"
    environment = {name: value for name, value in os.environ.items() if name != PURE_PYTHON}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(FOLDER, ignore_errors=True)
        typer.echo(done.stderr.rstrip(), err=True)
        raise CommandError("what was built can't be imported, see above; it was removed")


def _path_of(module: str) -> str:
    """The source file of a module of the package, relative to the package's folder."""
    path = module.partition(".")[2].replace(".", "/")
    folder = f"{path}/__init__.py" if path else "__init__.py"
    return folder if (PACKAGE / folder).is_file() else f"{path}.py"


def source_closure(modules: Iterable[str]) -> list[str]:
    """Source files on which the compiled form of modules depends: theirs, and those that they import, in turn.

    mypyc takes types and constants from all of them.

    Returns:
        Paths relative to the package's folder, sorted.
    """
    found: dict[str, None] = {}
    todo = list(modules)
    while todo:
        module = todo.pop()
        path = _path_of(module)
        if path in found or not (PACKAGE / path).is_file():
            continue
        found[path] = None
        todo.append(module.rpartition(".")[0] or module)
        for node in ast.walk(ast.parse((PACKAGE / path).read_bytes())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            todo += [name for name in names if name.split(".")[0] == "minedraft"]
    return sorted(found)
