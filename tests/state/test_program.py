"""--state DIR: the program, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kprobefs.cli.main import main
from kprobefs.common.errors import ExitStatus
from kprobefs.daemon.backends import build_kernel
from kprobefs.daemon.state.state_directory import pending_warnings
from kprobefs.mount_options import MountOptions
from stress.endurance.state_kills import state_kills
from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.sample import fewer
from tests.state.life import DEFINITIONS

IN_A_LIFE = """
import sys
from tests.state.life import *
run = Run(Path(sys.argv[1]))
run.write("/kprobe_events", DEFINITIONS)
run.write("/tracing/events/kprobes/enable", "1")
run.hit(5)
print(len(run.records("/tracing")) >= 5, run.kept())
run.end()
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setenv("KPROBEFS_PROBES_PATH", "")
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("layout", ["full", "tracefs"])
def test_kill_and_start_again(directory: Path, place: Path, layout: str) -> None:
    options = ("--state", str(place), "--layout", layout)
    tracing = "" if layout == "tracefs" else "tracing"
    with daemon(directory, *options, program=REAL_PROGRAM) as running:
        Path(running.path(tracing, "kprobe_events")).write_text(DEFINITIONS)
        os.mkdir(running.path(tracing, "instances", "slow"))
        Path(running.path(tracing, "events/kprobes/reads/enable")).write_text("1")
        marker = Path(running.path(tracing, "trace_marker"))
        marker.write_text("before")
        defined = Path(running.path(tracing, "kprobe_events")).read_text()
        other = kprobefs("mount", *options, str(place.with_name("other")), "--mkdir", program=REAL_PROGRAM)
        assert other.returncode == ExitStatus.FAILURE
        assert f"--state {place}: another daemon keeps its state there" in other.stderr
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    with daemon(directory, *options, program=REAL_PROGRAM) as running:
        assert Path(running.path(tracing, "kprobe_events")).read_text() == defined
        assert Path(running.path(tracing, "events/kprobes/reads/enable")).read_text() == "1\n"
        assert os.path.isdir(running.path(tracing, "instances", "slow"))
        last = Path(running.path(tracing, "instances/last/trace")).read_text()
        assert "tracing_mark_write: before" in last
        assert ": reads: (vfs_read" in last
        assert not running.log.count("state in")


@needs_fuse
@pytest.mark.mounted
def test_what_is_damaged_is_told_by_mount(directory: Path, place: Path) -> None:
    def mounted(layout: str) -> str:
        options = ("--state", str(place), "--layout", layout)
        done = kprobefs("mount", *options, str(directory), program=REAL_PROGRAM)
        machine = directory / (".control" if layout == "tracefs" else "") / "machine"
        state = (machine / "state").read_text()
        assert done.returncode == ExitStatus.OK
        assert kprobefs("umount", str(directory), program=REAL_PROGRAM).returncode == ExitStatus.OK
        assert state.startswith(f"directory {place}\nkept yes\nlast nothing\n")
        return f"{done.stderr}{''.join(state.splitlines(keepends=True)[3:])}"

    assert mounted("full") == ""
    for layout in ("full", "tracefs"):
        (place / "journal").write_text("junk\n")
        why = "no journal of kprobefs: set aside as aside.journal, aside.records"
        assert mounted(layout) == f"kprobefs: --state {place}: {why}\ntrouble {why}\n"


def test_a_kernel_of_a_distribution_keeps_none(
    directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a distribution's kernel, --state only prints a warning, because the systemd units always pass this
    option.
    """
    served: list[MountOptions] = []
    monkeypatch.setattr(
        "kprobefs.daemon.daemon.run_in_foreground", lambda options, *_more: served.append(options)
    )
    kernel = ["--kprobes", "kernel", "--image", "host"]
    assert (
        main(["mount", "-f", "--state", str(place), *kernel, str(directory)], build_kernel) == ExitStatus.OK
    )
    assert [options.state for options in served] == [None]
    assert capsys.readouterr().err == (
        "kprobefs: --state: not supported with a distribution's kernel; nothing is kept\n"
    )
    assert not place.exists()


@pytest.mark.parametrize("inside", ["", "state"])
def test_no_state_below_its_own_mount(directory: Path, inside: str) -> None:
    found = kprobefs("mount", "--state", str(directory / inside), str(directory))
    assert found.returncode == ExitStatus.USAGE
    assert found.stderr.endswith(": inside a mount point\n")
    assert not list(directory.iterdir())


@needs_fuse
@pytest.mark.mounted
def test_a_file_system_without_shared_mappings(directory: Path, place: Path) -> None:
    """A state inside a mount, such as in scratch/, is refused.

    Without this check, the daemon runs but keeps nothing.
    """
    with daemon(directory, program=REAL_PROGRAM) as running:
        inside = running.path("scratch", "state")
        link = place.with_name("link")
        link.symlink_to(running.path("scratch"))
        for state in (inside, str(link / "state")):
            found = kprobefs("mount", "--state", state, "--mkdir", str(place.with_name("other")))
            assert (found.returncode, found.stderr) == (
                ExitStatus.USAGE,
                f"kprobefs: --state {state}: inside a mount point\n",
            )
        found = subprocess.run(
            [sys.executable, "-c", IN_A_LIFE, inside], capture_output=True, text=True, timeout=60, check=False
        )
        assert (found.stdout, found.returncode) == ("True kept no: No such device\n", 0), found.stderr


def test_the_mount_command_names_what_keeps_changes_from_being_saved(tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine/state").write_text("directory /state\nkept no: No space left on device\n")
    [warning] = pending_warnings(str(tmp_path))
    assert warning == "changes are not saved until this is mended: No space left on device"


def test_seeded_kills(tmp_path: Path) -> None:
    assert "kernels killed" in state_kills(tmp_path, fewer(8, 4), 0, 3)
