"""System calls of processes on the files of a real FUSE mount."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuse.harness import PATIENCE, Daemon, daemon, eventually, needs_fuse, waits_for_mount
from tests.vfs import oracle

pytestmark = [needs_fuse, pytest.mark.mounted]

EVENTS = "tracing/events/kprobes"


def shell(command: str, mounted: Daemon) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=mounted.directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def assert_errno(number: int) -> pytest.RaisesExc[OSError]:
    return pytest.raises(OSError, match=rf"Errno {number}\b")


def write(path: str, data: bytes, flags: int = os.O_WRONLY) -> int:
    descriptor = os.open(path, flags)
    try:
        return os.write(descriptor, data)
    finally:
        os.close(descriptor)


def test_shell_commands_work(mounted: Daemon) -> None:
    script = """
        set -e
        echo p:a vfs_read > kprobe_events
        echo p:b vfs_mkdir >> kprobe_events
        cat tracing/kprobe_events
        echo 1 > tracing/events/kprobes/a/enable
        cat tracing/events/kprobes/enable
        head -c 4 tracing/README; echo
        cp tracing/README ../copy; wc -c < ../copy
        dd if=kprobe_events bs=5 skip=1 count=1 status=none; echo
        grep -c . kprobes/blacklist
        test -d tracing/events/kprobes/b
        echo -:b >> kprobe_events
        test ! -d tracing/events/kprobes/b
    """
    result = shell(script, mounted)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:4] == ["p:kprobes/a vfs_read", "p:kprobes/b vfs_mkdir", "X", "trac"]
    assert int(lines[4]) > 1000
    assert lines[5] == "obes/"
    assert int(lines[6]) > 10


def test_o_trunc_belongs_to_open(mounted: Daemon) -> None:
    events = mounted.path("kprobe_events")
    write(events, b"p:a vfs_read\n")
    write(mounted.path(EVENTS, "a/enable"), b"1")
    with assert_errno(errno.EBUSY):
        os.open(events, os.O_WRONLY | os.O_TRUNC)
    os.truncate(events, 0)
    write(mounted.path(EVENTS, "a/enable"), b"0")
    os.close(os.open(events, os.O_RDONLY | os.O_TRUNC))
    assert Path(events).read_text() == "p:kprobes/a vfs_read\n"
    os.close(os.open(events, os.O_WRONLY | os.O_TRUNC))
    assert Path(events).read_text() == ""


def test_direct_io_is_refused_after_the_file_was_opened(mounted: Daemon) -> None:
    events = mounted.path("kprobe_events")
    write(events, b"p:a vfs_read\n")
    for name in ("kprobe_events", "tracing/trace", "machine/version"):
        with assert_errno(errno.EINVAL):
            os.open(mounted.path(name), os.O_RDONLY | os.O_DIRECT)
    with assert_errno(errno.EINVAL):
        os.open(events, os.O_WRONLY | os.O_TRUNC | os.O_DIRECT)
    assert Path(events).read_text() == ""


def test_errno_reaches_the_writer(mounted: Daemon) -> None:
    with assert_errno(errno.ENOENT):
        write(mounted.path("kprobe_events"), b"p:a nosuch\n")
    with assert_errno(errno.EINVAL):
        write(mounted.path("kprobes/list"), b"1")
    with assert_errno(errno.EINVAL):
        write(mounted.path("tracing/README"), b"1")
    result = shell("echo p:a nosuch > kprobe_events", mounted)
    assert "No such file or directory" in result.stderr


def test_split_writes_as_recorded(mounted: Daemon) -> None:
    """Each write(2) to kprobe_events is parsed alone, so that a command split into two writes fails twice.

    The errors are those that a real Linux has recorded.
    """
    descriptor = os.open(mounted.path("kprobe_events"), os.O_WRONLY | os.O_APPEND)
    with assert_errno(errno.ENOENT):
        os.write(descriptor, b"p:a vfs")
    with assert_errno(errno.EINVAL):
        os.write(descriptor, b"_mkdir\n")
    assert os.write(descriptor, b"p:a vfs_mkdir") == 13
    assert os.write(descriptor, b"\n") == 1
    os.close(descriptor)
    assert Path(mounted.path("kprobe_events")).read_text() == "p:kprobes/a vfs_mkdir\n"


def test_positions_as_recorded(mounted: Daemon) -> None:
    descriptor = os.open(mounted.path("kprobe_events"), os.O_RDWR)
    answers = [
        os.write(descriptor, b"p:a vfs_mkdir\n"),
        os.read(descriptor, 4096).decode(),
        os.lseek(descriptor, 0, os.SEEK_SET),
        os.read(descriptor, 4096).decode(),
    ]
    os.close(descriptor)
    assert answers == [14, "p:kprobes/a vfs_mkdir\n", 0, "p:kprobes/a vfs_mkdir\n"]
    assert answers == oracle.quirks()["rdwr_same_fd"]


def test_seeks(mounted: Daemon) -> None:
    write(mounted.path("kprobe_events"), b"p:a vfs_mkdir\n")
    descriptor = os.open(mounted.path("kprobe_events"), os.O_RDONLY)
    assert os.read(descriptor, 7) == b"p:kprob"
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 7
    assert os.lseek(descriptor, 5, os.SEEK_SET) == 5
    assert os.read(descriptor, 7) == b"obes/a "
    assert os.pread(descriptor, 10, 10) == b"a vfs_mkdi"
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)


def test_directory_operations_fail_as_recorded(mounted: Daemon) -> None:
    write(mounted.path("kprobe_events"), b"p:a vfs_mkdir\n")
    tracing, kprobes = mounted.path("tracing"), mounted.path("kprobes")
    attempts = {
        "mkdir tracing/x": lambda: os.mkdir(f"{tracing}/x"),
        "mkdir events/x": lambda: os.mkdir(f"{tracing}/events/x"),
        "unlink kprobe_events": lambda: os.unlink(f"{tracing}/kprobe_events"),
        "rename": lambda: os.rename(f"{tracing}/trace", f"{tracing}/t"),
        "rmdir events/kprobes/a": lambda: os.rmdir(f"{tracing}/events/kprobes/a"),
        "create file": lambda: os.open(f"{tracing}/x", os.O_CREAT | os.O_WRONLY),
        "symlink": lambda: os.symlink("trace", f"{tracing}/x"),
        "link": lambda: os.link(f"{tracing}/trace", f"{tracing}/x"),
        "chmod 0600": lambda: os.chmod(f"{tracing}/kprobe_events", 0o600),
        "chown 65534": lambda: os.chown(f"{tracing}/kprobe_events", 65534, 65534),
        "truncate": lambda: os.truncate(f"{tracing}/kprobe_events", 0),
        "truncate 5": lambda: os.truncate(f"{tracing}/kprobe_events", 5),
        "utime": lambda: os.utime(f"{tracing}/kprobe_events", (1, 2)),
        "setxattr": lambda: os.setxattr(f"{tracing}/trace", "user.x", b"1"),
        "getxattr": lambda: os.getxattr(f"{tracing}/trace", "user.x"),
        "listxattr": lambda: os.listxattr(f"{tracing}/trace"),
        "mkdir debug/kprobes/x": lambda: os.mkdir(f"{kprobes}/x"),
        "unlink debug/kprobes/list": lambda: os.unlink(f"{kprobes}/list"),
        "create debug": lambda: os.open(f"{kprobes}/x", os.O_CREAT | os.O_WRONLY),
        "mknod": lambda: os.mknod(f"{tracing}/x"),
    }
    ours = {}
    for name, attempt in attempts.items():
        try:
            ours[name] = str(attempt())
        except OSError as error:
            ours[name] = f"ERR {errno.errorcode[error.errno]}".replace("EOPNOTSUPP", "ENOTSUP")
    recorded = oracle.quirks()["fs_ops"]
    assert ours == {name: recorded[name] for name in ours}
    found = os.stat(f"{tracing}/kprobe_events")
    assert f"{found.st_mode:o} {found.st_uid} {found.st_gid}" == recorded["mode after"]
    assert (found.st_atime, found.st_mtime) == (1, 2)
    assert os.statvfs(tracing).f_namemax == 255


def test_files_of_a_removed_event(mounted: Daemon) -> None:
    write(mounted.path("kprobe_events"), b"p:a vfs_read\n")
    enable = os.open(mounted.path(EVENTS, "a/enable"), os.O_RDWR)
    write(mounted.path("kprobe_events"), b"-:a\n", os.O_WRONLY | os.O_APPEND)
    assert not os.path.exists(mounted.path(EVENTS))
    with assert_errno(errno.ENODEV):
        os.pread(enable, 10, 0)
    with assert_errno(errno.ENODEV):
        os.write(enable, b"1")
    os.close(enable)


def test_listings_tell_types_and_numbers(mounted: Daemon) -> None:
    """Directory listings have the same types and inode numbers as stat(2).

    Programs such as perf use the types of listings.
    """
    for directory in ("", "tracing", "tracing/events", "tracing/events/sched"):
        with os.scandir(mounted.path(directory)) as entries:
            for entry in entries:
                found = os.stat(entry.path)
                assert entry.inode() == found.st_ino
                assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(found.st_mode)


def test_no_file_is_taken_for_another(mounted: Daemon) -> None:
    """No two files have the same inode number.

    find, grep and cp would take two such files for one file, and skip one of them or warn.
    """
    script = r"""
        find . -printf '%i\n' | sort | uniq -d
        grep -rl NOSUCHWORD kprobes tracing/options
        cp -r tracing/options ../copied && diff -r tracing/options ../copied
    """
    result = shell(script, mounted)
    assert (result.stdout, result.stderr) == ("", "")


def test_inode_numbers_are_stable(mounted: Daemon) -> None:
    numbers = {os.stat(mounted.path("tracing/trace")).st_ino for _ in range(3)}
    assert len(numbers) == 1
    assert os.stat(mounted.path("tracing/trace_pipe")).st_ino not in numbers


@pytest.mark.parametrize("options", [[], ["--allow-other"]])
def test_other_users_get_in_as_far_as_modes_allow(directory: Path, options: list[str]) -> None:
    """With --allow-other, other users have the access that the modes give. Without the option, they are
    refused altogether.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with daemon(directory, *options) as mounted:
        command = f"cat {mounted.path('machine/kallsyms')}; cat {mounted.path('kprobes/list')}"
        result = subprocess.run(
            ["sh", "-c", command],
            user=65534,
            group=65534,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert ("0000000000000000 T vfs_read\n" in result.stdout) == bool(options)
    assert bool(result.stdout) == bool(options)
    assert "ffffffff" not in result.stdout
    assert result.stderr.count("Permission denied") == (1 if options else 2)


def test_big_directories_and_paths(mounted: Daemon) -> None:
    lines = "".join(f"p:event{number} vfs_read\n" for number in range(2000))
    write(mounted.path("kprobe_events"), lines.encode())
    names = os.listdir(mounted.path(EVENTS))
    assert len(names) == 2002
    assert os.stat(mounted.path(EVENTS)).st_nlink == 2002
    assert len(Path(mounted.path("kprobe_events")).read_bytes()) > 40_000
    with assert_errno(errno.ENOENT):
        os.stat(os.fsencode(mounted.path()) + b"/\xff\xfe")


class TestPipe:
    """trace_pipe: reads wait for records, signals end waiting reads, and poll(2) reports records."""

    @pytest.fixture
    def pipe(self, mounted: Daemon) -> str:
        return mounted.path("tracing/trace_pipe")

    @pytest.fixture
    def marker(self, mounted: Daemon) -> str:
        return mounted.path("tracing/trace_marker")

    def test_is_a_stream(self, pipe: str) -> None:
        descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        with assert_errno(errno.EAGAIN):
            os.read(descriptor, 10)
        with assert_errno(errno.ESPIPE):
            os.lseek(descriptor, 0, os.SEEK_SET)
        with assert_errno(errno.ESPIPE):
            os.pread(descriptor, 10, 0)
        with assert_errno(errno.EBUSY):
            os.open(pipe, os.O_RDONLY)
        os.close(descriptor)

    @pytest.mark.parametrize("place", ["", "instances/other/"])
    def test_files_without_a_position(self, mounted: Daemon, place: str) -> None:
        """Files that have no llseek in Linux refuse lseek(2) with ESPIPE. Other files of tracefs accept
        lseek(2).
        """
        os.makedirs(mounted.path("tracing/instances/other"), exist_ok=True)
        raw = (
            "per_cpu/cpu0/trace_pipe_raw",
            "per_cpu/cpu0/snapshot_raw",
            "per_cpu/cpu0/trace_pipe",
            "trace_pipe",
        )
        names = (
            "trace_marker",
            "trace_marker_raw",
            "free_buffer",
            *(() if place else ("saved_cmdlines_size",)),
        )
        for name, flags in [*((each, os.O_RDONLY) for each in raw), *((each, os.O_WRONLY) for each in names)]:
            descriptor = os.open(mounted.path("tracing", place + name), flags | os.O_NONBLOCK)
            for whence in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
                with assert_errno(errno.ESPIPE):
                    os.lseek(descriptor, 0, whence)
            os.close(descriptor)
        for name in ("trace", "tracing_on", "buffer_size_kb", "set_event", "trace_clock"):
            descriptor = os.open(mounted.path("tracing", place + name), os.O_RDONLY)
            assert os.lseek(descriptor, 1, os.SEEK_SET) == 1
            os.close(descriptor)

    def test_use_of_files_without_a_position(self, mounted: Daemon, marker: str) -> None:
        descriptor = os.open(marker, os.O_WRONLY | os.O_APPEND)
        for number in range(3):
            assert os.write(descriptor, b"mark %d\n" % number) == 7
        os.close(descriptor)
        text = Path(mounted.path("tracing/trace")).read_text()
        assert [line[-1] for line in text.splitlines() if ": mark " in line] == ["0", "1", "2"]
        descriptor = os.open(mounted.path("tracing/saved_cmdlines_size"), os.O_RDWR)
        assert os.write(descriptor, b"300\n") == 4
        os.close(descriptor)
        descriptor = os.open(mounted.path("tracing/saved_cmdlines_size"), os.O_RDONLY)
        assert [os.read(descriptor, 3) for _ in range(3)] == [b"655", b"2\n", b""]
        os.close(descriptor)

    def test_flags_set_later_count(self, pipe: str) -> None:
        descriptor = os.open(pipe, os.O_RDONLY)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
        with assert_errno(errno.EAGAIN):
            os.read(descriptor, 10)
        os.close(descriptor)

    def test_flags_set_later_count_at_the_end_too(self, mounted: Daemon, pipe: str, marker: str) -> None:
        """After a record was read and tracing was turned off, a read fails with EAGAIN if O_NONBLOCK is set,
        and else returns 0.
        """
        descriptor = os.open(pipe, os.O_RDONLY)
        write(marker, b"hello\n")
        assert os.read(descriptor, 4096)
        write(mounted.path("tracing/tracing_on"), b"0")
        os.set_blocking(descriptor, False)
        with assert_errno(errno.EAGAIN):
            os.read(descriptor, 10)
        os.set_blocking(descriptor, True)
        assert os.read(descriptor, 10) == b""
        os.close(descriptor)

    def test_a_read_waits(self, pipe: str, marker: str) -> None:
        descriptor = os.open(pipe, os.O_RDONLY)
        started = time.monotonic()
        timer = threading.Timer(0.2, write, (marker, b"hello\n"))
        timer.start()
        assert os.read(descriptor, 100).endswith(b": tracing_mark_write: hello\n")
        assert time.monotonic() - started > 0.1
        timer.join()
        os.close(descriptor)

    def test_poll(self, pipe: str, marker: str) -> None:
        descriptor = os.open(pipe, os.O_RDONLY)
        poll = select.epoll()
        poll.register(descriptor, select.EPOLLIN)
        assert poll.poll(0) == []
        timer = threading.Timer(0.2, write, (marker, b"hello\n"))
        timer.start()
        assert poll.poll(PATIENCE) == [(descriptor, select.EPOLLIN)]
        timer.join()
        assert os.read(descriptor, 100).endswith(b": tracing_mark_write: hello\n")
        assert select.select([descriptor], [], [], 0) == ([], [], [])
        poll.close()
        os.close(descriptor)

    def test_ordinary_files_are_ready(self, marker: str) -> None:
        descriptor = os.open(marker, os.O_WRONLY)
        assert select.select([], [descriptor], [], PATIENCE)[1] == [descriptor]
        os.close(descriptor)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_signals_end_a_blocked_reader(self, pipe: str, number: signal.Signals) -> None:
        reader = subprocess.Popen(["cat", pipe], stdout=subprocess.DEVNULL)
        eventually(lambda: _is_blocked(reader.pid))
        reader.send_signal(number)
        assert reader.wait(PATIENCE) == -number
        descriptor = os.open(pipe, os.O_RDONLY)
        os.close(descriptor)

    def test_other_files_work_beside_a_blocked_reader(self, mounted: Daemon, pipe: str) -> None:
        reader = subprocess.Popen(["cat", pipe], stdout=subprocess.DEVNULL)
        eventually(lambda: _is_blocked(reader.pid))
        assert Path(mounted.path("machine/version")).read_text().startswith("Linux version")
        reader.kill()
        reader.wait(PATIENCE)

    def test_sigterm_ends_the_daemon_under_a_blocked_reader(self, mounted: Daemon, pipe: str) -> None:
        reader = subprocess.Popen(["cat", pipe], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        eventually(lambda: _is_blocked(reader.pid))
        assert mounted.stop(signal.SIGTERM) == 0
        _, errors = reader.communicate(timeout=PATIENCE)
        assert reader.returncode == 1
        assert errors
        assert not os.path.ismount(mounted.directory)


def _is_blocked(pid: int) -> bool:
    with suppress(OSError):
        return "trace_pipe" in os.readlink(f"/proc/{pid}/fd/3") and Path(
            f"/proc/{pid}/stat"
        ).read_text().split()[2] in ("S", "D")
    return False


def test_a_killed_client_does_not_wait_for_the_end_of_its_write(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SIGTERM kills a client during a write, the client ends at once, while the write goes on.

    A client that handles the signal waits for the end of the write.
    """
    holding = tmp_path / "holding"
    holding.touch()
    monkeypatch.setenv("KPROBEFS_TEST_HOLDING", str(holding))
    with daemon(directory, "--seed", "669") as mounted:
        file = mounted.path("kprobes/optimization")
        before = Path(mounted.path("machine/limits")).read_text()
        echo = subprocess.Popen(["sh", "-c", 'echo 0 > "$1"', "sh", file])
        eventually(lambda: holding.read_text() == "held", "the write does not begin")
        handler = "import os, signal, sys; signal.signal(15, print); os.write(os.open(sys.argv[1], 1), b'1')"
        with subprocess.Popen([sys.executable, "-c", handler, file], stdout=subprocess.PIPE) as other:
            eventually(lambda: waits_for_mount(other.pid), "the other one does not wait")
            other.terminate()
            echo.terminate()
            assert echo.wait(PATIENCE) == -signal.SIGTERM
            # The signal has woken the client for a moment.
            eventually(lambda: waits_for_mount(other.pid), "the other one does not wait any more")
            holding.unlink()
            assert b"15" in other.communicate(timeout=PATIENCE)[0]
            assert other.returncode == 0
        eventually(lambda: Path(mounted.path("machine/limits")).read_text() == before, "a file is open")
        assert Path(file).read_text() == "1\n"
        assert mounted.stop(signal.SIGTERM) == 0
        assert "ERROR" not in mounted.log


def test_a_write_stops_after_its_killed_client_has_ended(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a client is killed while its write enables 300 events, events that are not enabled yet stay
    disabled.

    The file is closed.
    """
    holding = tmp_path / "holding"
    monkeypatch.setenv("KPROBEFS_TEST_HOLDING", str(holding))
    with daemon(directory, "--seed", "672") as mounted:
        limits = Path(mounted.path("machine/limits"))

        def handles() -> list[str]:
            return [line for line in limits.read_text().splitlines() if "open_files" in line]

        write(mounted.path("kprobe_events"), b"".join(b"p:e%d int_sqrt\n" % number for number in range(300)))
        before = handles()
        holding.touch()
        file = mounted.path("tracing/events/kprobes/enable")
        client = subprocess.Popen(["sh", "-c", 'echo 1 > "$1"', "sh", file])
        eventually(lambda: holding.read_text() == "held", "the write does not begin")
        client.kill()
        assert client.wait(PATIENCE) == -signal.SIGKILL
        holding.unlink()
        eventually(lambda: handles() == before, "a file is open")
        assert Path(file).read_text() == "X\n"
        assert mounted.stop(signal.SIGTERM) == 0
        assert "ERROR" not in mounted.log


def test_faults_become_eio_and_are_logged(directory: Path) -> None:
    with daemon(directory, "--seed", "667") as mounted:
        for _ in range(2):
            with assert_errno(errno.EIO):
                write(mounted.path("kprobes/optimization"), b"1")
        assert Path(mounted.path("machine/version")).read_text()
        assert mounted.stop(signal.SIGTERM) == 0
        assert "internal fault in write" in mounted.log
        assert "SystemExit" in mounted.log


def test_concurrent_clients(mounted: Daemon) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_number in range(10):
                name = f"e{number}_{round_number}"
                write(
                    mounted.path("kprobe_events"), f"p:{name} vfs_read\n".encode(), os.O_WRONLY | os.O_APPEND
                )
                assert Path(mounted.path(EVENTS, name, "enable")).read_text() == "0\n"
                write(mounted.path("kprobe_events"), f"-:{name}\n".encode(), os.O_WRONLY | os.O_APPEND)
                assert not os.path.exists(mounted.path(EVENTS, name))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
