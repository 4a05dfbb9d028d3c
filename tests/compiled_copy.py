"""A compiled copy of the package in a folder of its own, made by `minedraft compile`; the tree stays as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import minedraft
from minedraft.compiled import PURE_PYTHON

PACKAGE = Path(minedraft.__file__).parent
COMMAND = "import sys; from minedraft.cli import run_cli; sys.exit(run_cli(sys.argv[1:]))"


def copy_package(root: Path) -> None:
    """Copy the package's sources to `root/minedraft`; its three links become folders."""
    shutil.copytree(PACKAGE, root / "minedraft", ignore=shutil.ignore_patterns("__pycache__", ".compiled"))


def environment(root: Path | None = None, *, plain: bool = False) -> dict[str, str]:
    """Variables with which Python runs the package below `root`, or the installed one."""
    variables = {name: value for name, value in os.environ.items() if name not in (PURE_PYTHON, "PYTHONPATH")}
    if root is not None:
        variables["PYTHONPATH"] = str(root)
    if plain:
        variables[PURE_PYTHON] = "1"
    return variables


def command(root: Path, *arguments: str, plain: bool = False) -> subprocess.CompletedProcess[str]:
    """Carry out a command line of the package below `root`, in that folder."""
    line = [sys.executable, "-c", COMMAND, *arguments]
    variables = environment(root, plain=plain)
    return subprocess.run(line, env=variables, cwd=root, capture_output=True, text=True, check=False)


@contextmanager
def builds(compiled: bool) -> Iterator[dict[str, dict[str, str]]]:
    """Variables by the name of a build: `plain` and, if asked for, `compiled`, which may have to be made first."""
    with tempfile.TemporaryDirectory() as name:
        found = {"plain": environment(plain=True)}
        if compiled and minedraft.BUILD.active:
            found["compiled"] = environment()
        elif compiled:
            copy_package(Path(name))
            print("compiling a copy of the package", file=sys.stderr)
            done = command(Path(name), "compile")
            if done.returncode:
                sys.exit(done.stderr)
            found["compiled"] = environment(Path(name))
        yield found
