"""Translates modules to C with mypyc and compiles them; run as a script, in a process of its own, by `compile`.

Usage: python -P mypyc_build.py OUTPUT_FOLDER FILE.py ...   (in a folder that holds copies of the sources)

mypyc and setuptools change global state, print what they like and exit on errors, so they don't run in the command's
process. The extension modules end up in the output folder, laid out as their sources are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

TRANSLATED: Final = "-- translated --"  # tells `compile` how far it is

# As in pyproject.toml, which no installed package has beside it; what SimPy returns is just an object to compiled code.
MYPY_SETTINGS: Final = """\
[mypy]
[mypy-simpy.*]
follow_imports = skip
ignore_missing_imports = True
"""


def build(output: Path, files: list[str]) -> None:
    """Compile files of the package in the current folder.

    Args:
        output: a folder, which is there.
        files: such as minedraft/scheduler.py.
    """
    from mypyc.build import mypycify
    from setuptools import setup

    Path("mypy.ini").write_text(MYPY_SETTINGS, encoding="utf-8")
    # One group, so that calls between modules are calls in C; its name is that of the library that they share.
    extensions = mypycify(["--config-file=mypy.ini", *files], group_name="minedraft", debug_level="0")
    print(TRANSLATED, flush=True)  # noqa: T201
    setup(
        name="minedraft-compiled",
        packages=[],
        ext_modules=extensions,
        script_args=["--quiet", "build_ext", "--build-lib", str(output), "--build-temp", "temp"],
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
