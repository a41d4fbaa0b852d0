"""scripts/package: all files of the Debian package are in their places, its programs start from there, and
systemd accepts its units.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.harness import needs_fuse

ROOT = Path(__file__).resolve().parents[2]
COMPLETION = {
    "bash": "usr/share/bash-completion/completions/kprobefs",
    "zsh": "usr/share/zsh/vendor-completions/_kprobefs",
    "fish": "usr/share/fish/vendor_completions.d/kprobefs.fish",
}
ISOLATED = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package from this environment, as scripts/package does after its environment is set up;
    return its path.
    """
    directory = tmp_path_factory.mktemp("package")
    script = ROOT / "scripts/debian_package.py"
    subprocess.run(
        [sys.executable, "-P", script, directory, "--quick"],
        check=True,
        timeout=100,
        stdout=subprocess.DEVNULL,
    )
    (built,) = directory.glob("*.deb")
    return built


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a root directory that contains only the files of the package."""
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["dpkg-deb", "-x", package, root], check=True, timeout=60)
    yield root
    shutil.rmtree(root)


def field(package: Path, name: str) -> str:
    command = ["dpkg-deb", "-f", package, name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_says_what_it_needs(package: Path) -> None:
    major, minor = sys.version_info[:2]
    depends = field(package, "Depends")
    assert f"python3 (>= {major}.{minor}), python3 (<< {major}.{minor + 1})" in depends
    assert "libfuse2" in depends
    assert "unicorn 2.1.3" in field(package, "Description")


def test_all_stands_in_its_place(installed: Path) -> None:
    places = (
        ("usr/bin/kprobefs", 0o755),
        ("usr/sbin/mount.fuse.kprobefs", 0o755),
        ("usr/lib/systemd/system/kprobefs.service", 0o644),
        ("usr/lib/systemd/system/kprobefs@.service", 0o644),
        ("usr/lib/systemd/user/kprobefs.service", 0o644),
        ("usr/lib/systemd/system-preset/90-kprobefs.preset", 0o644),
        ("usr/lib/systemd/user-preset/90-kprobefs.preset", 0o644),
        ("usr/lib/tmpfiles.d/kprobefs.conf", 0o644),
        ("usr/share/man/man1/kprobefs.1.gz", 0o644),
        ("usr/share/man/man5/kprobefs.5.gz", 0o644),
        ("usr/share/man/man8/mount.fuse.kprobefs.8.gz", 0o644),
        *((path, 0o644) for path in COMPLETION.values()),
        ("etc/default/kprobefs", 0o644),
        ("usr/share/doc/kprobefs/copyright", 0o644),
    )
    assert {path: (installed / path).stat().st_mode & 0o777 for path, _ in places} == dict(places)
    programs = {
        line.partition("=")[2].split()[0]
        for unit in (installed / "usr/lib/systemd").rglob("*.service")
        for line in unit.read_text().splitlines()
        if line.startswith("Exec")
    }
    assert programs == {"/usr/bin/kprobefs"}
    shipped = [path for path in installed.rglob("*") if path.is_file()]
    assert not [path for path in shipped if path.stat().st_mode & 0o6022]
    assert not [path for path in shipped if path.suffix in (".h", ".S", ".a")]


def test_no_link_of_a_document_is_dead(installed: Path) -> None:
    documents = installed / "usr/share/doc/kprobefs"
    for document in documents.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            assert "://" in target or (document.parent / target).exists(), (document, target)


def launched(installed: Path, command: str) -> list[str]:
    """Return the command line that runs a command of the package with this interpreter, with the directory
    `installed` in place of /.
    """
    text = (installed / command).read_text().replace('"/usr', f'"{installed}/usr')
    path = installed / f"{command}.here"
    path.write_text(text)
    return [sys.executable, "-I", str(path)]


def test_starts_with_its_own_packages(installed: Path) -> None:
    """Program and library start with the Python packages of the Debian package.

    The base interpreter has none of these.
    """
    base = Path(sys.base_prefix, "bin", Path(sys.executable).name)
    program = [str(base), *launched(installed, "usr/bin/kprobefs")[1:]]
    done = subprocess.run([*program, "--version"], env=ISOLATED, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kprobefs ")
    library = installed / "usr/lib/kprobefs"
    script = f"""
import sys
sys.path.insert(0, {str(library)!r})
import capstone, elftools, fuse, iced_x86, keystone, lz4.frame, rich, unicorn, zstandard
from emulated_kernel.kernel.api import Kernel
with Kernel() as kernel:
    print(kernel.call("strlen", "four"))
assert all(each.__file__.startswith({str(library)!r}) for each in (unicorn, capstone, fuse, keystone))
"""
    done = subprocess.run(
        [base, "-I", "-c", script], env=ISOLATED, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_bytecode_is_in_the_package(tmp_path: Path) -> None:
    """Bytecode is put into the package, even if PYTHONPYCACHEPREFIX names another place.

    The bytecode has Debian's path of the module, and is not compared with the source.
    """
    module = tmp_path / "usr/lib/kprobefs/a.py"
    module.parent.mkdir(parents=True)
    module.write_text("here = (lambda: 0).__code__.co_filename\n")
    script = "import sys, pathlib, debian_package as it; it.compile_library(pathlib.Path(sys.argv[1]))"
    paths = {"PYTHONPATH": str(ROOT / "scripts"), "PYTHONPYCACHEPREFIX": str(tmp_path / "elsewhere")}
    command = [sys.executable, "-c", script, tmp_path]
    subprocess.run(command, env={**os.environ, **paths}, check=True, timeout=30)
    (compiled,) = (module.parent / "__pycache__").iterdir()
    data = compiled.read_bytes()
    # PEP 552: bytecode with a hash of the source that is not checked.
    assert data[4:8] == b"\x01\0\0\0"
    assert b"/usr/lib/kprobefs/a.py" in data
    assert str(tmp_path).encode() not in data


SMALL = """
import pathlib, sys, debian_package as it

def install_program(tree, _work):
    it.put(tree / it.LIBRARY / "kprobefs/cli.py", b"")

it.install_program = install_program
it.install_requirements = lambda _tree: []
it.build(pathlib.Path(sys.argv[1]), is_quick=True)
"""
"""Program that builds the package in a directory, with one Python file in place of all."""


def build_small(directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build the package with one Python file. `variables`: additional environment variables."""
    return subprocess.run(
        [sys.executable, "-c", SMALL, directory],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_removing_leaves_nothing(tmp_path: Path) -> None:
    """dpkg removes and purges the package without leftovers, also after an interpreter with other options has
    written bytecode.

    An upgrade does not remove the bytecode. The package has the control files and the directories of the
    whole package, but only one Python file.
    """
    root = tmp_path / "root"
    assert build_small(tmp_path).returncode == 0
    (package,) = tmp_path.glob("*.deb")
    for directory in ("info", "updates"):
        (root / "var/lib/dpkg" / directory).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    # Without unsafe-io, dpkg waits until each file is on the disk.
    forced = [f"--force-{what}" for what in ("not-root", "depends", "script-chrootless", "unsafe-io")]

    def dpkg(*arguments: str | Path) -> None:
        command = ["dpkg", f"--root={root}", "--log=/dev/null", *forced, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "not empty" not in done.stdout + done.stderr

    dpkg("--install", package)
    library = root / "usr/lib/kprobefs"
    for file in ("kprobefs/__pycache__/cli.cpython-311.opt-1.pyc", "__pycache__/x.pyc"):
        (library / file).parent.mkdir(exist_ok=True)
        (library / file).write_bytes(b"")
    state = root / "var/lib/kprobefs/mnt"
    state.mkdir(parents=True)
    (state / "journal").touch()
    # An upgrade that is given up must leave the old package as it was.
    before = set(library.rglob("*.pyc"))
    dpkg("--install", package)
    assert set(library.rglob("*.pyc")) >= before
    for action, kept in (
        ("--remove", {"etc/default/kprobefs", "var/lib/kprobefs/mnt/journal"}),
        ("--purge", set()),
    ):
        dpkg(action, "kprobefs")
        left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        assert {path for path in left if not path.startswith("var/lib/dpkg/")} == kept
        assert not library.exists()


def test_an_interrupted_build_leaves_no_package(tmp_path: Path) -> None:
    """If dpkg-deb fails, no package is left."""
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin/dpkg-deb"
    broken.write_text(
        '#!/bin/sh\nfor last; do :; done\n[ ! -d "$last" ] || last=$last/k.deb\n: > "$last"; exit 1\n'
    )
    broken.chmod(0o755)
    done = build_small(tmp_path / "out", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert done.returncode
    assert "dpkg-deb" in done.stderr
    assert os.listdir(tmp_path / "out") == []


@needs_fuse
@pytest.mark.mounted
def test_runs(installed: Path, tmp_path: Path) -> None:
    program = launched(installed, "usr/bin/kprobefs")
    environment = {**ISOLATED, "KPROBEFS_RUNTIME_DIRECTORY": str(tmp_path / "runtime")}
    command = [*program, "run", "--", "sh", "-c", 'cat "$KPROBEFS/machine/version"']
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Linux version 6.1")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("unit", ["kprobefs.service", "kprobefs@mnt-kp.service"])
def test_systemd_finds_no_fault_in_the_installed_units(installed: Path, unit: str) -> None:
    """systemd-analyze finds no fault in the installed units.

    Paths in the units must exist in the package; the manager's own units come from the host.
    """
    (installed / "usr/lib/systemd/system").mkdir(exist_ok=True)
    for name in (
        "sysinit.target",
        "basic.target",
        "shutdown.target",
        "multi-user.target",
        "system.slice",
        "-.slice",
    ):
        source = Path("/usr/lib/systemd/system", name)
        if source.exists():
            shutil.copy(source, installed / "usr/lib/systemd/system" / name)
    done = subprocess.run(
        ["systemd-analyze", f"--root={installed}", "verify", "--man=no", "--recursive-errors=one", unit],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("shell", COMPLETION)
def test_the_completion_is_the_programs(installed: Path, shell: str) -> None:
    program = Path(sysconfig.get_path("scripts"), "kprobefs")
    said = subprocess.run([program, "completion", shell], check=True, capture_output=True, text=True).stdout
    assert (installed / COMPLETION[shell]).read_text() == said
