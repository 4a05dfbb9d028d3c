"""Which modules run compiled (see `minedraft compile`), and that no stale build ever runs.

A build lies in `minedraft/.compiled/<ABI>/`: extension modules, and a stamp with a hash of every source file that they
depend on. They don't lie beside their sources, because Python would prefer them there whatever they were made from.
Instead `import minedraft` calls `activate` before anything else, which hashes those files (a millisecond; without a
build it looks for a folder and is done) and serves the extension modules only if all are as they were. Otherwise the
sources run, which is always right, and a warning says so.

Law of this file: it runs at every import, so it imports little; it knows nothing of how a build is made.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import source_hash, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

PACKAGE: Final = Path(__file__).parent
SUFFIX: Final = EXTENSION_SUFFIXES[0]  # names the interpreter's ABI, such as .cpython-311-x86_64-linux-gnu.so
HOME: Final = PACKAGE / ".compiled"
FOLDER: Final = HOME / SUFFIX.strip(".").partition(".")[0]
STAMP: Final = "stamp"
PURE_PYTHON: Final = "MINEDRAFT_PURE_PYTHON"  # set in the environment, no build is used


class StaleBuildWarning(RuntimeWarning):
    """There is a compiled build, but sources were changed since; they run as plain Python."""


class Build(NamedTuple):
    """What there is for this interpreter.

    Attributes:
        modules: names of the extension modules; empty if there is no build.
        changed: source files, relative to the package, that differ from what was compiled.
        active: whether the extension modules run in this process.
    """

    modules: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    active: bool = False

    @property
    def label(self) -> str:
        """What `minedraft --version` adds; empty without a build."""
        if not self.modules:
            return ""
        if self.changed:
            return " (compiled build is STALE and not used: run minedraft compile)"
        return " (compiled)" if self.active else f" (compiled build is not used: {PURE_PYTHON} is set)"


class _Finder:
    """Serves extension modules by their full name."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = frozenset(modules)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in self._modules:
            return None
        location = str(FOLDER / (name.replace(".", "/") + SUFFIX))
        return spec_from_file_location(name, location, loader=ExtensionFileLoader(name, location))


def hash_of(path: Path) -> str:
    """Hash of a source file; a file that can't be read has one of its own."""
    try:
        return source_hash(path.read_bytes()).hex()
    except OSError:
        return "gone"


def find_build() -> Build:
    """Look for a build and compare its stamp with the sources; `active` is left False."""
    try:
        lines = (FOLDER / STAMP).read_text(encoding="utf-8").splitlines()
    except OSError:
        return Build()
    files = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob(f"*{SUFFIX}"))
    modules = [".".join(path.parts).removesuffix(SUFFIX) for path in files]
    changed = [path for known, _, path in (line.partition(" ") for line in lines) if hash_of(PACKAGE / path) != known]
    return Build(tuple(modules), tuple(changed))


def activate() -> Build:
    """Let the extension modules of a build that is up to date be imported; warn of one that is not.

    Returns:
        What there is.
    """
    build = find_build()
    if not build.modules or os.environ.get(PURE_PYTHON):
        return build
    if build.changed:
        first, more = build.changed[0], len(build.changed) - 1
        also = f" and {more} more" if more else ""
        warnings.warn(
            f"the compiled build of minedraft is stale ({first}{also} changed since): running as plain Python; "
            "run `minedraft compile`, or `minedraft compile --remove`",
            StaleBuildWarning,
            stacklevel=3,
        )
        return build
    sys.meta_path.insert(0, _Finder(build.modules))
    return build._replace(active=True)
