"""Attacks by other users on an owner's commands: locked files, paths taken in advance, misleading names."""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kprobefs.cli import as_system, control
from kprobefs.common import daemon_registry
from kprobefs.common.daemon_registry import Daemon, Registration, running
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, daemon, is_mounted, kprobefs, needs_fuse
from tests.fuse.harness import Daemon as Served

NOBODY = 65534
PR_SET_DUMPABLE = 4


def as_nobody(action: Callable[[], object]) -> bytes:
    """Call `action` in a process of the user nobody, and return its result as text. Skip the test without
    root.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    # User nobody may be unable to read the interpreter's files.
    codecs.lookup("ascii")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, str(action()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@contextmanager
def attacker(path: Path) -> Iterator[str]:
    """Start a process of the user nobody that opens and locks all files below `path` that it can open.

    Yield the number of opened files.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    script = f"""
import fcntl, os, sys, time
os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)
held = []
for directory, _, names in os.walk({str(path)!r}):
    for name in [".", *names]:
        for flags in (os.O_RDWR, os.O_RDONLY):
            try:
                held.append(os.open(os.path.join(directory, name), flags))
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass
print(len(held), flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdout.close()


@pytest.fixture
def runtime_path() -> Iterator[Path]:
    """Yield the path of a runtime directory, in a parent directory that every user may search."""
    import tempfile

    with (
        tempfile.TemporaryDirectory(prefix="kprobefs-test-") as parent,
        pytest.MonkeyPatch.context() as patch,
    ):
        os.chmod(parent, 0o755)
        patch.setenv("KPROBEFS_RUNTIME_DIRECTORY", f"{parent}/run")
        yield Path(parent, "run")


@needs_fuse
@pytest.mark.mounted
def test_commands_beside_an_attacker(runtime_path: Path, directory: Path) -> None:
    """The owner's commands succeed while another user has opened and locked all files that this user can
    open.

    The only such file is the runtime directory.
    """
    for commands in (_commands(directory), ()):
        with attacker(runtime_path):
            assert kprobefs("mount", str(directory), program=REAL_PROGRAM).returncode == 0
            with attacker(runtime_path) as held:
                assert held == "1"
                [state] = json.loads(
                    kprobefs("status", "--json", str(directory), program=REAL_PROGRAM).stdout
                )
                assert (state["condition"], state["daemon"]["directory"]) == ("serving", str(directory))
                for command in commands:
                    done = kprobefs(*command, program=REAL_PROGRAM)
                    assert (done.returncode, done.stderr) == (0, ""), command
                assert kprobefs("umount", str(directory), program=REAL_PROGRAM).returncode == 0
                assert not is_mounted(directory)
                assert (
                    kprobefs("status", str(directory), program=REAL_PROGRAM).returncode
                    == ExitStatus.NOT_MOUNTED
                )


def _commands(directory: Path) -> Iterator[Sequence[str]]:
    """Yield the arguments of commands that use the mount `directory`, or make another mount."""
    saved = str(directory.with_name("saved.probes"))
    yield "save", "-m", str(directory), saved
    yield "apply", "-m", str(directory), saved
    read = ("sh", "-c", "echo x > f; cat f; rm f")
    yield "trace", "p:vfs_read", "-m", str(directory), "--", *read
    yield "trace", "p:vfs_read", "--", *read
    yield "run", "--", "sh", "-c", 'test -d "$KPROBEFS/scratch"'
    yield "reboot", str(directory)
    yield "status", str(directory)


def test_records_are_for_their_owner(runtime_path: Path) -> None:
    registration = Registration(Daemon(os.getpid(), "/x", "x86_64", "full", "0", "now"))
    [record] = runtime_path.glob("daemons/*")
    assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert as_nobody(lambda: os.open(record, os.O_RDONLY)) == b""
    registration.close()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_record_that_others_could_lock_or_write_is_not_trusted(runtime_path: Path, mode: int) -> None:
    registration = Registration(Daemon(os.getpid(), "/x", "x86_64", "full", "0", "now"))
    assert running("/x") is not None
    [record] = runtime_path.glob("daemons/*.json")
    record.chmod(mode)
    assert running("/x") is None
    registration.close()
    record.touch()
    record.chmod(mode)
    with record.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(CliError, match="not a private file of yours"):
            Registration(Daemon(os.getpid(), "/x", "x86_64", "full", "0", "now"))


def test_a_link_is_no_record(runtime_path: Path, tmp_path: Path) -> None:
    Registration(Daemon(os.getpid(), "/x", "x86_64", "full", "0", "now"))
    [record] = runtime_path.glob("daemons/*.json")
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    assert running("/x") is None


@pytest.mark.parametrize("squat", ["base", "daemons", "link"])
def test_a_squatted_runtime_directory(runtime_path: Path, squat: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    place = runtime_path if squat == "base" else runtime_path / "daemons"
    if squat == "link":
        runtime_path.mkdir()
        place.symlink_to("/tmp")
    else:
        place.mkdir(parents=True)
        os.chown(place, NOBODY, NOBODY)
    with pytest.raises(CliError, match="belongs to somebody else"):
        daemon_registry.runtime_directory()


@needs_fuse
@pytest.mark.mounted
def test_commands_where_the_runtime_directory_is_squatted(runtime_path: Path, directory: Path) -> None:
    """If the runtime directory belongs to another user, each command fails with one line that gives the
    reason.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    runtime_path.mkdir()
    os.chown(runtime_path, NOBODY, NOBODY)
    refused = kprobefs("mount", str(directory), program=REAL_PROGRAM)
    assert (refused.returncode, is_mounted(directory)) == (ExitStatus.FAILURE, False)
    assert "belongs to somebody else" in _only_line(refused)
    assert "isn't mounted there" in _only_line(kprobefs("status", str(directory), program=REAL_PROGRAM))
    # A mount whose daemon has another runtime directory cannot be told from another user's mount.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KPROBEFS_RUNTIME_DIRECTORY", f"{runtime_path.parent}/own")
        served = ExitStack()
        served.enter_context(daemon(directory))
    with served:
        assert "mounted there already" in _only_line(kprobefs("mount", str(directory), program=REAL_PROGRAM))
        for arguments in (("status",), ("status", str(directory)), ("umount", str(directory))):
            refused = kprobefs(*arguments, program=REAL_PROGRAM)
            assert refused.returncode == ExitStatus.FAILURE
            assert "belongs to somebody else" in _only_line(refused)
        assert is_mounted(directory)


def _only_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that a failed program has written to standard error."""
    assert (ended.returncode != 0, ended.stdout) == (True, "")
    [line] = ended.stderr.splitlines()
    return line


def test_a_left_environment_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If XDG_RUNTIME_DIR and HOME belong to another user, as after su(1), the runtime directory is made in
    /tmp.
    """
    monkeypatch.delenv("KPROBEFS_RUNTIME_DIRECTORY")
    tmp_path.chmod(0o755)
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / ".cache").mkdir()
    assert as_nobody(daemon_registry._base_path) == f"/tmp/kprobefs-{NOBODY}".encode()


def test_records_of_a_user_who_is_root_in_a_namespace(
    monkeypatch: pytest.MonkeyPatch, runtime_path: Path
) -> None:
    """The runtime directory of a user who is root in a user namespace is named after the outer user.

    `run --as-system` makes such a namespace. /run there belongs to another user.
    """
    monkeypatch.delenv("KPROBEFS_RUNTIME_DIRECTORY")
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(daemon_registry, "FALLBACK", f"{runtime_path.parent}/kprobefs-")
    runtime_path.parent.chmod(0o777)

    def inside() -> object:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
        try:
            as_system.enter_namespace()
        except CliError as failure:
            return f"no namespace: {failure}"
        return os.geteuid(), str(daemon_registry.runtime_directory())

    answer = as_nobody(inside).decode()
    if answer.startswith("no namespace"):
        pytest.skip(answer)
    assert answer == str((0, f"{runtime_path.parent}/kprobefs-{NOBODY}/daemons"))


class TestProcesses:
    """A record's daemon is known by its pid, start time and executable. A later process with the same pid is
    not taken for the daemon.
    """

    @pytest.fixture
    def record(self, runtime_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
        """Yield the path of a record, and the process `sleep` that the record describes as a daemon."""
        bystander = subprocess.Popen(["sleep", "60"])
        registration = Registration(Daemon(bystander.pid, "/x", "x86_64", "full", "0", "now"))
        [path] = runtime_path.glob("daemons/*.json")
        yield path, bystander
        registration.close()
        bystander.kill()
        bystander.wait(PATIENCE)

    def test_it_is_known(self, record: tuple[Path, subprocess.Popen[bytes]]) -> None:
        found = running("/x")
        assert found is not None
        assert found.pid == record[1].pid

    @pytest.mark.parametrize("key", ["started", "executable"])
    def test_a_reused_pid_is_nobody(
        self, record: tuple[Path, subprocess.Popen[bytes]], key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, bystander = record
        text = json.loads(path.read_text())
        text["process"][key] = [1, 2] if key == "executable" else text["process"][key] - 1
        path.write_text(json.dumps(text))
        assert running("/x") is None
        mountpoints = control.mountpoints
        point = mountpoints.MountPoint(1, "/x", "0:1", mountpoints.FSTYPE, "tracefs", os.geteuid())
        mounted = [point]
        monkeypatch.setattr(mountpoints, "mounted_on", lambda _directory: mounted[0] if mounted else None)
        monkeypatch.setattr(mountpoints, "detach", lambda _directory: mounted.clear())
        control.unmount("/x", force=True)
        assert mounted == []
        assert bystander.poll() is None

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "{}", '{"daemon": 1, "process": 2}', '{"daemon": {}, "process": {}}', "\udcff"],
    )
    def test_a_damaged_record_is_nobody(
        self, record: tuple[Path, subprocess.Popen[bytes]], text: str
    ) -> None:
        record[0].write_bytes(text.encode(errors="surrogateescape"))
        assert running("/x") is None


@needs_fuse
@pytest.mark.mounted
def test_a_mount_of_root_is_not_for_others_to_unmount(mounted: Served) -> None:
    def unmount() -> object:
        try:
            return control.unmount(str(mounted.directory))
        except CliError as failure:
            return failure

    expected = f"{mounted.directory}: mounted by root; only root can unmount it"
    assert as_nobody(unmount).decode() == expected
    assert is_mounted(mounted.directory)


@needs_fuse
@pytest.mark.mounted
def test_names_reach_terminals_escaped(directory: Path) -> None:
    odd = directory / "a\033[2J\n\u202eb\udcff\u00e9"
    odd.mkdir()
    try:
        with daemon(odd) as served:
            for result in (kprobefs("status", str(odd)), kprobefs("mount", str(odd)), kprobefs("status")):
                output = result.stdout + result.stderr
                assert "a\\x1b[2J\\n\\u202eb\\xff\u00e9" in output
                assert all(line.isprintable() for line in output.splitlines())
            listed = json.loads(kprobefs("status", "--json").stdout)
            assert str(odd) in [each["directory"] for each in listed]
            served.stop(signal.SIGTERM)
            assert "\033" not in served.log
    finally:
        odd.rmdir()


def test_what_is_shown() -> None:
    assert escape_for_terminal("plain, caf\u00e9 \u65e5\u672c") == "plain, caf\u00e9 \u65e5\u672c"
    assert escape_for_terminal("\0\a\x7f\x9b\u200b\U000e0001") == "\\x00\\x07\\x7f\\x9b\\u200b\\U000e0001"
