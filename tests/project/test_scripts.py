"""scripts/: the set-up reports why it cannot continue, and the walk-through fails if nothing is traced."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.harness import eventually, is_alive

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    *sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix != ".py"),
    ROOT / "examples/ext4.sh",
]


def lib(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `command` with scripts/lib.sh sourced, in a checkout that has no .venv."""
    script = f'root=/nonexistent; . "{ROOT}/scripts/lib.sh"; {command}'
    return subprocess.run(
        ["sh", "-eu", "-c", script], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


PACKAGES = {
    "busybox": "busybox-static",
    "cc": "gcc",
    "mkfs.ext4": "e2fsprogs",
    "perf": "linux-perf",
    "rpmbuild": "rpm",
}
"""Program -> its package, if their names differ."""
SYSTEMS_OWN = {
    *("apt-cache", "apt-get", "dpkg-deb", "findmnt", "nsenter", "systemd-analyze", "true", "unshare"),
    *("go", "node", "npm"),
    *("chromium", "chromium-browser", "google-chrome", "trace_processor_shell"),
}
"""Programs that are part of the system, or too large to install for one test."""


def test_what_tests_look_for_is_installed_for_them() -> None:
    """The set-up installs every program that tests look for, so that a fresh machine skips no test for lack
    of a package.
    """
    looked_for = re.compile(r'\b(?:which|needs)\("([^"]+)"\)')
    programs = {
        each
        for folder in ("tests", "stress")
        for path in (ROOT / folder).rglob("*.py")
        for each in looked_for.findall(path.read_text())
    }
    assert {"tmux", "faketime", "shellcheck"} < programs
    assert set(PACKAGES) <= programs
    needed = {
        "perf-tools-unstable" if each.endswith("-perf") else PACKAGES.get(each, each)
        for each in programs - SYSTEMS_OWN
    }
    assert needed <= set(lib("printf '%s' \"$test_tools\"").stdout.split())


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_is_posix_sh(script: Path) -> None:
    assert script.read_text().startswith(("#!/bin/sh\n", "# shellcheck shell=sh\n"))
    subprocess.run(["sh", "-n", script], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_is_content() -> None:
    subprocess.run(["shellcheck", "-x", "-P", ROOT, *SCRIPTS, ROOT / ".ci/run"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("os_release", "package"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "libfuse2"),
        ('ID=debian\nVERSION_ID="13"\n', "libfuse2t64"),
        ("ID=debian\n", "libfuse2t64"),
        ('ID=ubuntu\nVERSION_ID="22.04"\n', "libfuse2"),
        ('ID=ubuntu\nVERSION_ID="24.04"\n', "libfuse2t64"),
    ],
)
def test_libfuse_goes_by_the_distributions_name_for_it(tmp_path: Path, os_release: str, package: str) -> None:
    (tmp_path / "os-release").write_text(os_release)
    assert lib("libfuse_package", OS_RELEASE=str(tmp_path / "os-release")).stdout == f"{package}\n"


def test_without_root_and_sudo_one_line_names_the_packages(tmp_path: Path) -> None:
    executable(tmp_path / "id", "#!/bin/sh\necho 1000\n")
    done = lib(f"PATH={tmp_path}; install_packages libfuse2 fuse3")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("(no root and no sudo here): libfuse2 fuse3\n")


@pytest.mark.parametrize("name", ["exhaustion", "differential"])
def test_a_missing_package_of_the_tests_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "pytest.py").write_text('raise ModuleNotFoundError("No module", name="pytest")\n')
    command = [sys.executable, "-m", f"stress.{name}", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pytest is missing" in line
    assert ".[test]" in line


def test_an_old_python_is_one_line(tmp_path: Path) -> None:
    old = executable(tmp_path / "python3", "#!/bin/sh\ncase $2 in *print*) echo 3.9 ;; *) exit 1 ;; esac\n")
    done = lib("check_python", PYTHON=str(old))
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"Python 3.11 or newer is needed, {old} is 3.9 (PYTHON=... names another one)\n"
    )


def test_a_venv_of_another_place_is_not_sound(tmp_path: Path) -> None:
    done = lib(
        f'venv="{tmp_path}"; mkdir "$venv/bin"; ln -s {shutil.which("true")} "$venv/bin/python"; '
        'venv_identity > "$venv/.made-for"; venv_is_sound && echo sound; '
        'echo elsewhere > "$venv/.made-for"; venv_is_sound || echo stale'
    )
    assert done.stdout == "sound\nstale\n"


def test_a_linked_venv_is_kept(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (tmp_path / ".venv").symlink_to(others)
    done = lib(f'venv="{tmp_path}/.venv"; check_python; venv_is_sound || make_venv')
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert (tmp_path / ".venv").readlink() == others
    assert [*others.iterdir()] == []


@pytest.fixture
def dead_tree(tmp_path: Path) -> Path:
    """Return a directory with plain files that have the names of a mount's files.

    These files can be written, but nothing is traced.
    """
    for name in (
        "kprobes/list",
        "kprobe_events",
        "machine/version",
        "scratch/greeting",
        "tracing/trace",
        "tracing/events/kprobes/reads/enable",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "machine/version").write_text("Linux version 0.0.0\n")
    return tmp_path


def walk(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", ROOT / "scripts/walkthrough.sh"],
        env={**os.environ, "KPROBEFS": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_walk_through_fails_where_the_probe_is_in_no_list(dead_tree: Path) -> None:
    done = walk(dead_tree)
    assert done.returncode == 1
    assert done.stderr == "walk-through: the probe isn't in kprobes/list\n"


def test_the_walk_through_fails_on_an_empty_trace(dead_tree: Path) -> None:
    (dead_tree / "kprobes/list").write_text("ffffffff81000000  k  vfs_read+0x0\n")
    done = walk(dead_tree)
    assert done.returncode == 1
    assert done.stderr == "walk-through: the trace is empty: the probe was not hit\n"


def test_the_walk_through_keeps_to_80_columns(dead_tree: Path) -> None:
    (dead_tree / "machine/version").write_text("Linux version 0.0.0 " + "word " * 40 + "\n")
    shown = [line for line in walk(dead_tree).stdout.splitlines() if line.startswith("    ")]
    assert max(map(len, shown)) <= 80


def test_each_quick_module_is_there() -> None:
    """Each module in tests/quick.txt exists, so that a renamed module stays in the quick run."""
    modules = (ROOT / "tests/quick.txt").read_text().split()
    assert modules == sorted(set(modules))
    assert [module for module in modules if not (ROOT / module).is_file()] == []


WAITING = """
import os, time
from pathlib import Path

def test_that_waits() -> None:
    place = Path(__file__).parent
    try:
        (place / "made").write_text(str(os.getpid()))
        (place / "made").rename(place / "pid")
        time.sleep(60)
    finally:
        (place / "cleaned").touch()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with the scripts, and with a .venv that the scripts regard as complete.

    The .venv runs the Python of the tests.
    """
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pyproject.toml").touch()
    (root / ".venv/bin").mkdir(parents=True)
    executable(
        root / ".venv/bin/python",
        f"""#!/bin/sh\n[ "${{2-}}" = "import pip" ] || exec '{sys.executable}' "$@"\n""",
    )
    complete = (
        f'root="{root}"; . scripts/lib.sh; venv_identity >.venv/.made-for; '
        "sha256sum <pyproject.toml >.venv/.installed-test; "
        """printf '%s\\n' "$test_tools" >.venv/.test-tools; """
        """printf '%s\\n' "$test_wheels" >.venv/.test-wheels"""
    )
    subprocess.run(["sh", "-euc", complete], cwd=root, check=True)
    return root


def test_an_interrupt_of_the_terminal_ends_the_tests(tmp_path: Path, checkout: Path) -> None:
    """An interrupt ends scripts/test, its tests and their processes, and removes its temporary files.

    A terminal sends the interrupt to the whole process group.
    """
    test = tmp_path / "test_waiting.py"
    test.write_text(WAITING)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # With these, the script finds libfuse everywhere, and installs no package.
    programs = tmp_path / "programs"
    programs.mkdir()
    executable(programs / "ldconfig", "#!/bin/sh\necho libfuse.so.2\n")
    executable(programs / "fusermount", "#!/bin/sh\n")
    running = subprocess.Popen(
        [checkout / "scripts/test", str(test), "--rootdir", str(tmp_path)],
        env={**os.environ, "TMPDIR": str(temporary), "PATH": f"{programs}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        eventually((tmp_path / "pid").exists, "no test was run", patience=60)
        os.killpg(running.pid, signal.SIGINT)
        told, _ = running.communicate(timeout=30)
        assert running.returncode == 128 + signal.SIGINT
        assert "KeyboardInterrupt" in told
        assert (tmp_path / "cleaned").exists()
        assert not is_alive(int((tmp_path / "pid").read_text()))
        assert [*temporary.glob("tmp.*")] == []
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("seconds", "command", "status"),
    [("30", "exit 3", 3), ("30", "kill -9 $$", 128 + 9), ("1", "exec sleep 60", 124)],
)
def test_a_time_limit(seconds: str, command: str, status: int) -> None:
    limited = [sys.executable, str(ROOT / "scripts/time_limit.py"), seconds, "sh", "-c", command]
    assert subprocess.run(limited, capture_output=True, timeout=30, check=False).returncode == status
