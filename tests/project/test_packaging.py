"""The wheel: both packages whole, the kernel images, no C source, and a program that starts."""

from __future__ import annotations

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
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built without an index: the build backend is among the test dependencies."""
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
    """What has to be in the wheel: all that the packages hold except what builds the images."""
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
    """But what --as-system builds where it is run."""
    sources = {name for name in names if name.endswith((".c", ".h", ".S", ".lds"))}
    assert sources == {"kprobefs/mounts_shim.c"}


def test_names_its_licence_and_holds_it(names: set[str], metadata: str) -> None:
    assert "License-Expression: GPL-2.0-or-later\n" in metadata
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_starts_from_a_venv_of_its_own(tmp_path: Path) -> None:
    """Installed as by the Containerfile, but without an index: beside the test environment's dependencies."""
    venv = tmp_path / "a venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin/python"
    (site_packages,) = venv.glob("lib/python*/site-packages")
    # As a .pth line, so that the .pth files over there (setuptools' distutils) work as well.
    (site_packages / "dependencies.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )

    step = [str(ROOT) if word == "/src" else word for word in pip_step()]
    assert str(ROOT) in step
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *step, *offline], check=True)

    where = "import emulated_kernel, kprobefs; print(emulated_kernel.__file__, kprobefs.__file__, sep='\\n')"
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
