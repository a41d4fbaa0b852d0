"""The wheel: both packages whole, the kernel images, no C source, and a program that starts."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.project.recipes import pip_step

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

UNITS = ROOT / "systemd"
OFFLINE = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the project's wheel without an index, and return its path.

    The build backend is among the test dependencies.
    """
    directory = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--wheel-dir", directory]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT], check=True)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"kprobefs-{PROJECT['version']}.dist-info/METADATA").decode()


def shipped() -> set[str]:
    """Return the files that the wheel must have: all files of the packages, except those that build the
    images.
    """
    units = {f"kprobefs/systemd/{path.relative_to(UNITS)}" for path in UNITS.rglob("*") if path.is_file()}
    return units | {
        path.relative_to(ROOT).as_posix()
        for package in ("kprobefs", "emulated_kernel")
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and ROOT / "emulated_kernel/image/src" not in path.parents
    }


def test_holds_both_packages_whole(names: set[str]) -> None:
    assert {name for name in names if ".dist-info/" not in name and ".data/" not in name} == shipped()


def test_holds_the_manual(names: set[str]) -> None:
    pages = {name.partition("/data/")[2] for name in names if "/share/man/" in name}
    assert pages == {
        "share/man/man1/kprobefs.1",
        "share/man/man5/kprobefs.5",
        "share/man/man8/mount.fuse.kprobefs.8",
    }


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", "share/bash-completion/completions/kprobefs"),
        ("zsh", "share/zsh/site-functions/_kprobefs"),
        ("fish", "share/fish/vendor_completions.d/kprobefs.fish"),
    ],
)
def test_holds_completion_as_the_program_prints_it(wheel: Path, shell: str, place: str) -> None:
    program = Path(sysconfig.get_path("scripts"), "kprobefs")
    said = subprocess.run([program, "completion", shell], check=True, capture_output=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        held = archive.read(f"kprobefs-{PROJECT['version']}.data/data/{place}")
    assert held == said
    assert b"kprobefs" in held


def test_holds_the_kernel_images(names: set[str]) -> None:
    assert any(name.startswith("emulated_kernel/image/prebuilt/") for name in names)


def test_holds_no_c_source(names: set[str]) -> None:
    """The wheel has no C source, except the one that --as-system compiles on the user's machine."""
    sources = {name for name in names if name.endswith((".c", ".h", ".S", ".lds"))}
    assert sources == {"kprobefs/mounts_shim.c"}


def test_names_its_licence_and_holds_it(names: set[str], metadata: str) -> None:
    assert "License-Expression: GPL-2.0-or-later\n" in metadata
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the project's wheel as the Containerfile installs the project, but without an index; return the
    venv.

    The dependencies are those of the test environment.
    """
    venv = tmp_path_factory.mktemp("venvs") / "a venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    # With a .pth line, the .pth files of that directory (setuptools' distutils) also take effect.
    (site_packages / "dependencies.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    step = [str(wheel) if word == "/src" else word for word in pip_step()]
    assert str(wheel) in step
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python"]
    subprocess.run([*pip, *step, *OFFLINE, "--no-compile"], check=True)
    return venv


def test_starts_from_a_venv_of_its_own(venv: Path, tmp_path: Path) -> None:
    (site_packages,) = venv.glob("lib/python*/site-packages")
    where = "import emulated_kernel, kprobefs; print(emulated_kernel.__file__, kprobefs.__file__, sep='\\n')"
    python = venv / "bin/python"
    files = subprocess.run([python, "-c", where], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert all(file.startswith(str(site_packages)) for file in files.stdout.splitlines())

    done = subprocess.run(
        [venv / "bin/kprobefs", "--version"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert PROJECT["version"] in done.stdout
    written = [venv / "bin/kprobefs", "install-service", "--root", tmp_path / "root"]
    done = subprocess.run(written, cwd=tmp_path, check=True, capture_output=True, text=True)
    unit = tmp_path / "root/etc/systemd/system/kprobefs.service"
    assert f'ExecStart="{venv}/bin/kprobefs" mount' in unit.read_text()


EVIL = "import os; os.write(2, b'evil'); os._exit(66)"
"""Python code of a module that must not be imported: it prints a word and ends the process."""
VARIABLES = {
    "PYTHONHOME": "/nonexistent",
    "PYTHONPATH": "{evil}",
    "PYTHONUSERBASE": "{evil}",
    "PYTHONPLATLIBDIR": "nonexistent",
    "PYTHONSTARTUP": "{evil}/signal.py",
    "PYTHONINSPECT": "1",
    "PYTHONVERBOSE": "1",
    "PYTHONDEVMODE": "1",
    "PYTHONPROFILEIMPORTTIME": "1",
    "PYTHONMALLOCSTATS": "1",
    "PYTHONWARNINGS": "error",
    "PYTHONIOENCODING": "nonsense",
    "PYTHONBREAKPOINT": "nonsense",
    "PYTHONHASHSEED": "nonsense",
}


class Program:
    """An installed program, started in a directory with Python modules of common names, none of which may be
    imported.
    """

    def __init__(self, name: str, venv: Path, directory: Path) -> None:
        for module in ("signal.py", "sitecustomize.py", "usercustomize.py", "kprobefs.py"):
            (directory / module).write_text(EVIL)
        self._command = [venv / "bin" / name, *({"kprobefs": ["status", "--no-such-option"]}.get(name, []))]
        self._directory = directory
        self.plain = self.answer({})
        """The answer of the program if no environment variable of Python is set."""

    def answer(self, variables: dict[str, str]) -> tuple[int, str, str]:
        own = {"PATH": os.environ["PATH"], "HOME": str(self._directory), "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            self._command,
            env=own | {name: value.format(evil=self._directory) for name, value in variables.items()},
            cwd=self._directory,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module", params=["kprobefs", "mount.fuse.kprobefs"])
def program(request: pytest.FixtureRequest, venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(request.param, venv, tmp_path_factory.mktemp("evil"))


@pytest.mark.parametrize("variable", VARIABLES)
def test_no_variable_of_python_changes_what_it_does(variable: str, program: Program) -> None:
    assert program.plain[2].count("\n") == 1
    assert program.answer({variable: VARIABLES[variable]}) == program.plain


def test_a_command_of_run_has_its_variables_of_python(venv: Path) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no access to /dev/fuse")
    command = [venv / "bin/kprobefs", "run", "--", "sh", "-c", "echo $PYTHONHOME $PYTHONPATH"]
    own = {**os.environ, "PYTHONHOME": "/home", "PYTHONPATH": "/path"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "/home /path\n", "")


def test_starts_from_packages_that_python_does_not_look_at(wheel: Path, tmp_path: Path) -> None:
    """The program starts from packages that `python -I` leaves out, as after `pip install --user`."""
    target = ["--prefix", tmp_path, "--ignore-installed", "--no-warn-script-location", "--no-compile"]
    subprocess.run([sys.executable, "-m", "pip", "install", wheel, *target, *OFFLINE[:3]], check=True)
    own = {"PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [tmp_path / "bin/kprobefs", "--version"], env=own, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"kprobefs {PROJECT['version']}\n", "")
