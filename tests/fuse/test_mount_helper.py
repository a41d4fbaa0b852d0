"""mount.fuse.kprobefs: options that mount(8) passes, and a real mount(8) with and without an fstab line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kprobefs.cli import mount_helper
from kprobefs.cli.main import main
from kprobefs.common.errors import ExitStatus
from tests.fuse.harness import PROGRAM, ROOT, environment, kprobefs, needs_fuse


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("none /mnt", ""),
        ("none /mnt -o rw,defaults,noauto,x-systemd.automount,comment=mine", ""),
        ("none /mnt -n -o arch=riscv64,return_hook=fgraph", "--arch=riscv64 --return-hook=fgraph"),
        ("-o cpus=2,limit=probes=5 none /mnt -t fuse.kprobefs", "--cpus=2 --limit=probes=5"),
        ("none /mnt -sv -o noexec", "-o noexec"),
        ("none /mnt -o allow_other,state=/var/lib/kp", "--allow-other --state=/var/lib/kp"),
    ],
)
def test_options(words: str, expected: str) -> None:
    assert mount_helper.arguments(words.split()) == ["mount", *expected.split(), "--", "/mnt"]


def test_a_fake_mount_does_nothing() -> None:
    assert mount_helper.arguments(["none", "/mnt", "-fn"]) is None


@pytest.mark.parametrize("words", ["", "none", "none /mnt more", "none /mnt -o", "none /mnt -N 1"])
def test_wrong_usage(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mount.fuse.kprobefs", *words.split()])
    assert mount_helper.main() == mount_helper.WRONG_USAGE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "status"),
    [("ro", mount_helper.WRONG_USAGE), ("arch=z80", mount_helper.WRONG_USAGE), ("rw", mount_helper.FAILED)],
)
def test_what_fails_is_told_in_one_line(
    options: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mount.fuse.kprobefs", "none", "/nosuch", "-o", options])
    assert mount_helper.main() == status
    assert capsys.readouterr().err.count("\n") == 1


OF_MOUNT_FUSE = {
    "dev,suid": ("", mount_helper.FAILED),
    "rw,arch=i386,noexec,dev,suid": ("--arch=i386 -o noexec", mount_helper.FAILED),
    "nodev,nosuid": ("", mount_helper.FAILED),
    "arch=z80,dev,suid": ("--arch=z80", mount_helper.WRONG_USAGE),
}
"""Options from mount.fuse3 3.14 -> options for the program, and exit status if the mount point is missing."""


@pytest.mark.parametrize("options", OF_MOUNT_FUSE)
def test_mount_fuse_calls_the_program_itself(
    options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If /sbin has no mount.fuse.kprobefs, mount.fuse3 calls the program kprobefs itself, which must then
    accept the arguments of a mount helper.
    """
    words, status = OF_MOUNT_FUSE[options]
    ran: list[list[str]] = []

    def program(arguments: list[str]) -> int:
        ran.append(arguments)
        return main(arguments)

    monkeypatch.setattr(mount_helper, "program", program)
    assert main(["debugfs", "/no/such/place", "-o", options]) == status
    assert ran == [["mount", *words.split(), "--", "/no/such/place"]]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", ["munt /x", "munt /x -o noexec", "munt /x -o dev", "munt -o dev,suid"])
def test_a_mistyped_command_is_one(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == ExitStatus.USAGE
    assert "invalid choice: 'munt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("ro", "-o ro: not possible, since the files are there to be written"),
        ("suid", "-o suid: not possible, since FUSE mounts are nosuid"),
        ("dev", "-o dev: not possible, since FUSE mounts are nodev"),
        ("cpu_count=4", "-o cpu_count: no such option"),
        ("help", "-o help: no such option"),
        ("arch=z80", "argument --arch: invalid choice: 'z80'"),
    ],
)
def test_an_option_is_told_in_the_words_of_mount(
    option: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mount.fuse.kprobefs", "none", "/nosuch", "-o", option])
    assert mount_helper.main() == mount_helper.WRONG_USAGE
    assert why in capsys.readouterr().err


@needs_fuse
@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may call mount(8) so")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
@pytest.mark.parametrize("way", ["command", "fstab"])
def test_mount(way: str, directory: Path, tmp_path: Path) -> None:
    """mount(8) finds the helper, with and without a line in fstab.

    In the test's mount namespace, /sbin contains only the helper.
    """
    sbin, fstab = tmp_path / "sbin", tmp_path / "fstab"
    sbin.mkdir()
    helper = sbin / "mount.fuse.kprobefs"
    code = "import sys; from kprobefs.cli.mount_helper import main; sys.exit(main())"
    command = shlex.join(["env", f"PYTHONPATH={ROOT}", PROGRAM[0], "-c", code])
    helper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    helper.chmod(0o755)
    options = f"arch=riscv64,noexec,limit=instances=1,allow_other,state={tmp_path}/state"
    fstab.write_text(f"debugfs {directory} fuse.kprobefs {options},noauto,x-mine 0 0\n")
    command = {"command": f"-t fuse.kprobefs none {directory} -o {options}", "fstab": str(directory)}[way]
    script = f"""
        set -e
        mount --make-rprivate /
        mount --bind {sbin} /sbin
        mount --bind {fstab} /etc/fstab
        mount {command}
        cat {directory}/machine/version
        grep instances {directory}/machine/limits
        findmnt -n -o SOURCE,FSTYPE,OPTIONS {directory}
        head -n 1 {directory}/machine/state
        mount {command} 2>&1 || echo again $?
        umount {directory}
        findmnt {directory} || echo gone
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    version, _profile, instances, found, state, *again, gone = done.stdout.splitlines()
    assert (version.partition(" (")[0], instances) == ("Linux version 6.1.0-kprobefs", "instances 1 0")
    assert found.split()[:2] == ["debugfs", "fuse.kprobefs"]
    assert {"noexec", "nosuid", "nodev", "allow_other"} <= set(found.split()[2].split(","))
    assert state == f"directory {tmp_path}/state"
    assert "kprobefs is mounted there already" in again[0]
    assert (again[-1], gone) == ("again 32", "gone")
    assert kprobefs("status", str(directory)).returncode != 0
