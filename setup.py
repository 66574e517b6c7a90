"""Builds the CPU engine's native core beside its Python; everything else is in pyproject.toml.

Where no C++ compiler is found, or not for a processor of this kind, the package is installed
without it, and the server computes by torch's own kernels and says so. A compiler that CXX names,
with arguments or without, has to do it. What is built notes the commit that it was built from.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

HERE = Path(__file__).parent.resolve()
CPU = HERE / "lightserve" / "kernels" / "cpu"
COMMIT = Path("lightserve", "COMMIT")
OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-psabi"]


def build_core(directory: Path) -> None:
    """Compile the core into `directory`, or say why not.

    Raises SystemExit: the compiler that CXX names cannot do it.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    compiler = asked or next(([c] for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        print("lightserve: no C++ compiler; the CPU engine will be slower", file=sys.stderr)
        return
    # The module that loads it knows what to call its sources, and needs nothing but Python.
    sys.path.insert(0, str(CPU))
    from core import LIBRARY, SOURCES, sources_hash  # noqa: PLC0415

    library, name = directory / LIBRARY.name, sources_hash()
    if library.exists() and name.encode() in library.read_bytes():
        return
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory) as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:

        def run(*arguments: str) -> None:
            subprocess.run([*compiler, *OPTIONS, *arguments], check=True)

        def compiled(source: Path) -> str:
            result = f"{temporary}/{source.stem}.o"
            run(f'-DSOURCES="{name}"', "-c", str(source), "-o", result)
            return result

        try:
            parts = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
            run("-shared", *parts, "-o", f"{temporary}/{library.name}")
        except (OSError, subprocess.CalledProcessError) as error:
            if asked:
                sys.exit(f"lightserve: CXX: {error}")
            print(f"lightserve: {error}; the CPU engine will be slower", file=sys.stderr)
            return
        Path(temporary, library.name).replace(library)


def note_commit(tree: Path) -> None:
    """Write into a copy of the package which commit it is of, unless it knows no git."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        if (HERE / ".git").exists():
            commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout
            (tree / COMMIT).write_text(commit)


class BuildWithCore(build_py):
    """Builds the package, and the core into it."""

    def run(self) -> None:
        """Do both."""
        super().run()
        if not self.editable_mode:
            build_core(Path(self.build_lib) / CPU.relative_to(HERE))
            note_commit(Path(self.build_lib))


class WheelOfAnyPython(bdist_wheel):
    """The library is no extension of Python: it is for every version."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the versions, interfaces and platform that the wheel is for."""
        return "py3", "none", super().get_tag()[2]


class EditableWithCore(editable_wheel):
    """Installs the package where it is, with the core beside its sources."""

    def run(self) -> None:
        """Do both."""
        build_core(CPU)
        super().run()


class BinaryDistribution(Distribution):
    """A wheel for this platform: it has a library."""

    def has_ext_modules(self) -> bool:
        """Return that it has one."""
        return True


if __name__ == "__main__":
    setup(
        cmdclass={
            "bdist_wheel": WheelOfAnyPython,
            "build_py": BuildWithCore,
            "editable_wheel": EditableWithCore,
        },
        distclass=BinaryDistribution,
    )
