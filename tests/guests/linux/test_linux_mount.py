"""Mounts of a distribution's kernel with its own files: definitions, records, reads that wait, instances,
errors.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emulated_kernel.guests.common.host_processes import Fork, ProcessWatch
from emulated_kernel.guests.linux.guest import syscalls
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.mounts import native_mount
from emulated_kernel.image.linux.vmcore import CoreFile
from emulated_kernel.machine.core_dump import RAM_OFFSET
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import guest_of

SHELL, OTHER, STRANGER = Client(4001, 0, 0), Client(4002, 0, 0), Client(4003, 1000, 1000)


class Host(ProcessWatch):
    """A watch of host processes whose names, forks and exits are set by a test."""

    def __init__(self) -> None:
        self.forked: list[Fork] = []
        self.ended: list[int] = []
        self.names = {4001: "sh", 4002: "cat"}
        self.programs: dict[str, str] = {}
        """Name of a process -> path of the program that the process has executed."""

    def program(self, _pid: int, comm: str) -> str | None:
        return self.programs.get(comm)

    def comm(self, pid: int) -> str | None:
        return self.names.get(pid, "?")

    def has_events(self) -> bool:
        return bool(self.forked or self.ended)

    def forks(self) -> list[Fork]:
        found, self.forked = self.forked, []
        return found

    def exited(self) -> list[int]:
        found, self.ended = self.ended, []
        return found


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def mount(host: Host) -> Iterator[Mount]:
    found = debian_kernel.mount(host)
    yield found
    found.close()


@pytest.fixture
def shell(mount: Mount) -> Files:
    return Files(mount, SHELL)


@pytest.fixture(scope="module")
def refusing() -> Iterator[Files]:
    """Yield files of one mount for writes that are refused and change nothing but the error log."""
    found = debian_kernel.mount(Host())
    yield Files(found, SHELL)
    found.close()


def test_a_probe_from_its_definition_to_its_record(shell: Files) -> None:
    shell.write("/kprobe_events", "p:opened do_sys_openat2 flags=+0(%dx):x64\n")
    assert shell.read("/tracing/kprobe_events") == "p:kprobes/opened do_sys_openat2 flags=+0(%dx):x64\n"
    shell.write("/tracing/events/kprobes/enable", "1")
    assert "do_sys_openat2+0x0" in shell.read("/kprobes/list")
    with pytest.raises(KernelError):
        Files(shell.mount, OTHER).read("/scratch/nothing")
    shell.write("/tracing/events/kprobes/enable", "0")
    trace = shell.read("/tracing/trace")
    assert re.search(r"\bcat-4002 .* opened: \(do_sys_openat2\+0x0/0x\w+\) flags=0x8000\n", trace)
    assert re.search(r"opened +[1-9]", shell.read("/kprobe_profile"))


@pytest.mark.parametrize(
    ("definition", "number", "said"),
    [
        ("p:x no_such_function", errno.ENOENT, "Invalid probed address or symbol"),
        ("p:x vfs_read+2", errno.EILSEQ, "Probe point is not an instruction boundary"),
        ("p:x vfs_read a=\\x", errno.EINVAL, "Invalid immediate value"),
        ("p:x vfs_read a=%nothing", errno.EINVAL, "Invalid register name"),
        ("p:1x vfs_read", errno.EINVAL, "Event name must follow the same rules as C identifiers"),
    ],
)
def test_mistakes(definition: str, number: int, said: str, refusing: Files) -> None:
    assert refusing.errno("/kprobe_events", definition) == number
    assert f"error: {said}\n  Command: {definition}\n" in refusing.read("/tracing/error_log")
    assert refusing.read("/kprobe_events") == ""


def test_a_reader_of_trace_pipe_waits_for_records(shell: Files) -> None:
    shell.write("/kprobe_events", "p:reads vfs_read\n")
    mount = shell.mount
    pipe = mount.open(OTHER, "/tracing/trace_pipe", os.O_RDONLY)
    assert mount.is_stream(pipe)
    notified: list[int] = []
    assert not mount.poll(pipe, lambda: notified.append(1)) & select.POLLIN
    for _ in range(3):
        with pytest.raises(WouldBlock):
            mount.read(OTHER, pipe, 4096, 0)
    shell.write("/tracing/events/kprobes/enable", "1")
    shell.read("/kprobe_profile")
    shell.write("/tracing/events/kprobes/enable", "0")
    assert notified == [1]
    assert b"reads: (vfs_read+0x0" in mount.read(OTHER, pipe, 4096, 0)
    mount.release(pipe)


def test_flags_of_a_file_whose_reader_sleeps(shell: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a reader sleeps, changed flags of the open file apply only to the next read.

    The task that sleeps in read(2) cannot make the fcntl(2) that sets the flags in the guest.
    """
    mount, changed = shell.mount, []
    pipe = mount.open(OTHER, "/tracing/trace_pipe", os.O_RDONLY)
    with pytest.raises(WouldBlock):
        mount.read(OTHER, pipe, 4096, 0)
    mount.set_status_flags(pipe, os.O_NONBLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(guest_of(mount).syscalls, "set_status_flags", lambda *_: changed.append(1))
        with pytest.raises(WouldBlock):
            mount.read(OTHER, pipe, 4096, 0)
    assert changed == []
    mount.give_up(OTHER, pipe, errno.EINTR)
    with pytest.raises(KernelError) as refused:
        mount.read(OTHER, pipe, 4096, 0)
    assert refused.value.errno == errno.EAGAIN
    mount.release(pipe)


def test_who_waits_in_vain_can_be_interrupted(shell: Files) -> None:
    mount = shell.mount
    pipe = mount.open(OTHER, "/tracing/trace_pipe", os.O_RDONLY)
    with pytest.raises(WouldBlock):
        mount.read(OTHER, pipe, 4096, 0)
    mount.give_up(OTHER, pipe, errno.EINTR)
    mount.release(pipe)
    assert Files(mount, OTHER).read("/kprobe_events") == ""
    handle = mount.open(OTHER, "/tracing/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(KernelError) as refused:
        mount.read(OTHER, handle, 4096, 0)
    assert refused.value.errno == errno.EAGAIN


def test_nothing_is_left_out_of_a_directory_that_loses_what_was_seen(shell: Files) -> None:
    """A client that lists a directory in parts and removes the listed files sees all files of the
    directory.
    """
    mount = shell.mount
    mount.mkdir(SHELL, "/scratch/many", 0o755)
    names = {f"file{number}" for number in range(9)}
    for name in names:
        mount.release(mount.create(SHELL, f"/scratch/many/{name}", 0o644, os.O_WRONLY))
    handle, seen = mount.opendir(SHELL, "/scratch/many"), 0
    while entries := mount.getdents(SHELL, handle, seen)[:3]:
        seen += len(entries)
        for entry in entries:
            if entry.name in names:
                names.remove(entry.name)
                mount.unlink(SHELL, f"/scratch/many/{entry.name}")
    assert not names
    assert {entry.name for entry in mount.getdents(SHELL, handle, 0)} == {".", ".."}
    mount.release(handle)
    mount.rmdir(SHELL, "/scratch/many")


def test_instances_and_directories(shell: Files) -> None:
    mount = shell.mount
    mount.mkdir(SHELL, "/tracing/instances/mine", 0o755)
    names = {entry.name: entry.kind for entry in mount.readdir("/tracing/instances/mine")}
    assert names["trace"] == stat.S_IFREG
    assert names["events"] == names["."] == names[".."] == stat.S_IFDIR
    mount.opendir(SHELL, "/tracing/instances/mine")
    mount.rmdir(SHELL, "/tracing/instances/mine")
    with pytest.raises(KernelError, match="No such file"):
        mount.getattr("/tracing/instances/mine")
    top = {entry.name for entry in mount.readdir("/")}
    assert top >= {"kprobes", "tracing", "scratch", "machine", "kprobe_events", "kprobe_profile"}
    files = {"cpu", "dmesg", "gdb", "history", "limits", "load", "vmcore"}
    files |= {"kallsyms", "meminfo", "modules", "version"}
    assert {entry.name for entry in mount.readdir("/machine")} == {".", "..", *files}


def test_the_limits_in_force(shell: Files) -> None:
    """machine/limits shows only the limits of open files, and cannot be opened for writing."""
    mount = shell.mount
    before = shell.read("/machine/limits")
    handle = mount.open(STRANGER, "/machine/version", os.O_RDONLY)
    after = shell.read("/machine/limits")
    mount.release(handle)
    found = [[line.split() for line in text.splitlines()] for text in (before, after)]
    assert [(name, most) for name, most, _ in found[0]] == [
        ("open_files", "65536"),
        ("user_open_files", "16384"),
    ]
    assert int(found[1][0][2]) == int(found[0][0][2]) + 1
    assert (found[0][1][2], found[1][1][2]) == ("0", "1")
    with pytest.raises(KernelError) as refused:
        mount.open(SHELL, "/machine/limits", os.O_WRONLY)
    assert refused.value.errno == errno.EACCES


def test_what_the_guest_s_proc_tells(shell: Files) -> None:
    mount = shell.mount
    handle = mount.open(SHELL, "/machine/kallsyms", os.O_RDONLY)
    assert re.match(rb"[0-9a-f]{16} \w \w+\n", mount.read(SHELL, handle, 4096, 0))
    mount.release(handle)
    assert shell.read("/machine/meminfo").startswith("MemTotal: ")
    assert shell.read("/machine/modules") == ""
    shell.write("/sysctl/debug/kprobes-optimization", "0")
    assert shell.read("/sysctl/debug/kprobes-optimization") == "0\n"
    shell.write("/dev/null", "nothing")
    assert shell.read("/dev/null") == ""
    assert stat.S_ISREG(mount.getattr("/dev/null").mode)
    for path in ("/machine/kallsyms", "/machine/version", "/dev/null/x"):
        with pytest.raises(KernelError):
            mount.mkdir(SHELL, path, 0o755)


def test_scratch_is_a_tmpfs_with_owners(shell: Files) -> None:
    mount = shell.mount
    text = "0123456789" * 2000
    handle = mount.create(STRANGER, "/scratch/file", 0o640, os.O_RDWR)
    assert mount.write(STRANGER, handle, text.encode(), 0) == len(text)
    assert mount.read(STRANGER, handle, 5, 19_000) == text.encode()[19_000:19_005]
    assert mount.fgetattr(handle) == mount.getattr("/scratch/file")
    found = mount.getattr("/scratch/file")
    assert (found.uid, found.gid, found.size, found.mode) == (1000, 1000, 20_000, stat.S_IFREG | 0o640)
    mount.symlink(SHELL, "/scratch/link", "file")
    assert mount.readlink(SHELL, "/scratch/link") == "file"
    mount.rename(SHELL, "/scratch/file", "/scratch/other")
    mount.chmod(SHELL, "/scratch/other", 0o600)
    mount.chown(SHELL, "/scratch/other", 0, -1)
    mount.utimens(SHELL, "/scratch/other", 5, None)
    mount.truncate(SHELL, "/scratch/other", 7)
    found = mount.getattr("/scratch/other")
    assert (found.uid, found.gid, found.size, found.atime_ns) == (0, 1000, 7, 5)
    with pytest.raises(KernelError) as refused:
        mount.open(STRANGER, "/scratch/other", os.O_RDONLY)
    assert refused.value.errno == errno.EACCES
    mount.unlink(SHELL, "/scratch/other")
    for change in (mount.unlink, mount.rmdir):
        with pytest.raises(KernelError):
            change(SHELL, "/machine/dmesg")


def test_a_probe_sees_the_syncs_of_clients(shell: Files) -> None:
    """fsync(2), fdatasync(2) and writes with O_SYNC are the client's own calls in the guest."""
    shell.write(
        "/kprobe_events",
        "p:sync __x64_sys_fsync\np:data __x64_sys_fdatasync\np:wrote vfs_write\np:noop noop_fsync\n",
    )
    mount = shell.mount

    def hits(flags: int, *calls: Callable[[int], object], path: str = "/scratch/f") -> dict[str, int]:
        handle = (
            mount.create(SHELL, path, 0o600, flags) if flags & os.O_ACCMODE else mount.opendir(SHELL, path)
        )
        shell.write("/tracing/events/kprobes/enable", "1")
        before = profile()
        for call in calls:
            call(handle)
        after = profile()
        shell.write("/tracing/events/kprobes/enable", "0")
        mount.release(handle)
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}

    def profile() -> dict[str, int]:
        rows = [line.split() for line in shell.read("/kprobe_profile").splitlines()]
        return {name: int(count) for name, count, _ in rows}

    def sync(handle: int) -> None:
        mount.fsync(SHELL, handle)

    def sync_data(handle: int) -> None:
        mount.fsync(SHELL, handle, only_data=True)

    def write(handle: int) -> None:
        assert mount.write(SHELL, handle, b"text", 0) == 4

    assert hits(os.O_RDWR, write) == {"wrote": 1}
    assert hits(os.O_RDWR, sync) == {"sync": 1, "noop": 1}
    assert hits(os.O_RDWR, sync_data, sync_data) == {"data": 2, "noop": 2}
    assert hits(os.O_RDWR | os.O_SYNC, write) == {"wrote": 1, "noop": 1}
    assert hits(os.O_RDWR | os.O_DSYNC, write) == {"wrote": 1, "noop": 1}
    assert hits(os.O_RDONLY, sync, path="/scratch") == {"sync": 1, "noop": 1}
    mount.fsync(SHELL, mount.opendir(SHELL, "/tracing"))
    with pytest.raises(KernelError) as refused:
        mount.fsync(SHELL, mount.open(SHELL, "/tracing/trace", os.O_RDONLY))
    assert refused.value.errno == errno.EINVAL


def test_an_open_directory_is_listed_where_it_is_now(shell: Files) -> None:
    mount = shell.mount
    for path in ("/scratch/a", "/scratch/a/b", "/scratch/a/b/c", "/scratch/empty"):
        mount.mkdir(SHELL, path, 0o755)
    moved, removed = (mount.opendir(SHELL, path) for path in ("/scratch/a/b", "/scratch/empty"))
    mount.rename(SHELL, "/scratch/a", "/scratch/empty")
    assert [entry.name for entry in mount.getdents(SHELL, moved, 0)] == [".", "..", "c"]
    with pytest.raises(KernelError, match="removed"):
        mount.getdents(SHELL, removed, 0)
    mount.rmdir(SHELL, "/scratch/empty/b/c")
    mount.rmdir(SHELL, "/scratch/empty/b")
    with pytest.raises(KernelError, match="removed"):
        mount.fgetattr(moved)
    for handle in (moved, removed):
        mount.release(handle)
    mount.rmdir(SHELL, "/scratch/empty")


def test_links_fifos_and_sockets_in_scratch(shell: Files) -> None:
    mount = shell.mount
    mount.release(mount.create(SHELL, "/scratch/file", 0o640, os.O_RDWR))
    mount.link(SHELL, "/scratch/file", "/scratch/other")
    assert mount.getattr("/scratch/other") == mount.getattr("/scratch/file")
    assert mount.getattr("/scratch/file").nlink == 2
    for name, mode in (("fifo", stat.S_IFIFO | 0o640), ("socket", stat.S_IFSOCK | 0o600)):
        mount.mknod(STRANGER, f"/scratch/{name}", mode)
        found = mount.getattr(f"/scratch/{name}")
        assert (found.mode, found.uid) == (mode, 1000)
    mount.mknod(SHELL, "/scratch/empty", stat.S_IFREG | 0o600)
    assert shell.read("/scratch/empty") == ""
    for number, change in (
        (errno.EEXIST, lambda: mount.link(SHELL, "/scratch/file", "/scratch/fifo")),
        (errno.ENOENT, lambda: mount.link(SHELL, "/scratch/none", "/scratch/new")),
        (errno.EXDEV, lambda: mount.link(SHELL, "/tracing/README", "/scratch/new")),
        (errno.EPERM, lambda: mount.link(SHELL, "/machine/dmesg", "/scratch/new")),
        (errno.EEXIST, lambda: mount.mknod(SHELL, "/scratch/file", stat.S_IFIFO | 0o600)),
        (errno.EPERM, lambda: mount.mknod(SHELL, "/scratch/null", stat.S_IFCHR | 0o600)),
        (errno.EPERM, lambda: mount.mknod(SHELL, "/tracing/fifo", stat.S_IFIFO | 0o600)),
    ):
        with pytest.raises(KernelError) as refused:
            change()
        assert refused.value.errno == number
    assert "new" not in {entry.name for entry in mount.readdir("/scratch")}


def test_room_in_scratch_is_what_its_tmpfs_has_left(shell: Files) -> None:
    mount = shell.mount
    before = mount.statfs("/scratch")
    assert before.block_size == 4096
    assert before.blocks >= before.free == before.available > 1000
    assert before.files > before.free_files > 0
    handle = mount.create(SHELL, "/scratch/file", 0o640, os.O_RDWR)
    mount.write(SHELL, handle, bytes(8 * 4096), 0)
    after = mount.statfs("/scratch/file")
    assert (before.free - after.free, before.free_files - after.free_files) == (8, 1)
    assert mount.statfs("/").blocks == mount.statfs("/tracing").blocks == 0


def test_forks_and_ends_of_processes_are_the_guest_s(host: Host, shell: Files) -> None:
    shell.write("/tracing/events/sched/sched_process_fork/enable", "1")
    shell.write("/tracing/events/sched/sched_process_exit/enable", "1")
    host.names[4100] = "sh"
    host.forked = [Fork(4100, 4001, "sh", 0, 0, alive=True), Fork(4200, 999, "?", 0, 0, alive=True)]
    shell.read("/kprobe_events")
    host.ended = [4100]
    trace = shell.read("/tracing/trace")
    assert re.search(r"sh-4001 .* sched_process_fork: comm=sh pid=4001 child_comm=sh child_pid=4100\n", trace)
    assert re.search(r"sh-4100 .* sched_process_exit: comm=sh pid=4100 ", trace)
    assert "4200" not in trace


def test_programs_that_clients_execute(host: Host, shell: Files) -> None:
    """An execve is shown at the next request of the same client.

    A process that renames itself shows no execve.
    """
    host.programs = {"asked": "./asked", "unasked": "/usr/bin/unasked", "shell": "/bin/shell"}
    for event in ("sched/sched_process_exec", "syscalls/sys_enter_execve"):
        shell.write(f"/tracing/events/{event}/enable", "1")
    forked = [Fork(pid, 4001, "sh", 0, 0, alive=True) for pid in (4100, 4101, 4102)]
    host.names |= {fork.pid: "sh" for fork in forked}
    host.forked = forked[:2]
    handle = shell.mount.create(Client(4100, 0, 0), "/scratch/kept", 0o600, os.O_RDWR)
    host.names |= {4100: "asked", 4101: "unasked"}
    shell.mount.write(Client(4100, 0, 0), handle, b"text", 0)
    host.names |= {4100: "itself", 4001: "shell", 4102: "shell"}
    host.forked = [Fork(4102, 4001, "shell", 0, 0, alive=True)]
    assert Files(shell.mount, Client(4100, 0, 0)).read("/scratch/kept") == "text"
    trace = shell.read("/tracing/trace")
    pattern = r"(\S+) +\[.* sched_process_exec: (.*)\n"
    shown = [
        ("asked-4100", "filename=./asked pid=4100 old_pid=4100"),
        ("shell-4001", "filename=/bin/shell pid=4001 old_pid=4001"),
    ]
    assert re.findall(pattern, trace) == shown
    assert trace.count("sys_execve(filename: ") == 2
    # Its name was known before, by a request of another process.
    assert Files(shell.mount, Client(4101, 0, 0)).read("/scratch/kept") == "text"
    shown.append(("unasked-4101", "filename=/usr/bin/unasked pid=4101 old_pid=4101"))
    assert re.findall(pattern, shell.read("/tracing/trace")) == shown
    shell.mount.release(handle)


def test_who_executes_is_counted_for_nobody_else(host: Host, shell: Files) -> None:
    """The kernel logs no warning if a client of another user forks, and the child executes a program and
    ends.
    """
    host.programs = {"cat": "/bin/cat"}
    handle = shell.mount.create(SHELL, "/scratch/file", 0o644, os.O_RDWR)
    shell.mount.write(SHELL, handle, b"text", 0)
    shell.mount.release(handle)
    parent, child = (Files(shell.mount, Client(pid, 1000, 1000)) for pid in (4100, 4101))
    host.names |= {4100: "sh", 4101: "sh"}
    assert parent.read("/scratch/file") == "text"
    host.forked = [Fork(4101, 4100, "sh", 0, 0, alive=True)]
    assert parent.read("/scratch/file") == "text"
    host.names[4101] = "cat"
    assert child.read("/scratch/file") == "text"
    host.ended = [4101, 4100]
    assert shell.read("/scratch/file") == "text"
    assert "WARN" not in shell.read("/machine/dmesg")


def test_modules_of_that_kernel(shell: Files) -> None:
    for command, number in (
        ("load no_such_module", errno.ENOENT),
        ("load /no/such.ko", errno.ENOENT),
        ("load /proc", errno.EISDIR),
        ("load /dev/zero", errno.EINVAL),
        ("load", errno.EINVAL),
        ("unload x", errno.ENOENT),
    ):
        assert shell.errno("/machine/modules", command) == number
    shell.write("/machine/modules", "load dm-zero\n")
    loaded = shell.read("/machine/modules")
    assert re.match(r"dm_zero \d+ 0 - Live 0x[0-9a-f]+", loaded)
    assert re.search(r"\ndm_mod \d+ 1 dm_zero, Live", loaded)
    shell.write("/kprobe_events", "p:mapped dm_zero:zero_map\n")
    assert "dm_zero:zero_map" in shell.read("/kprobe_events")
    assert shell.errno("/machine/modules", "load dm_zero") == errno.EEXIST
    assert shell.errno("/machine/modules", "unload dm_mod") == errno.EWOULDBLOCK
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    for name in ("dm-zero", "dm_mod"):
        shell.write("/machine/modules", f"unload {name}")
    assert "dm_" not in shell.read("/machine/modules")
    with pytest.raises(KernelError):
        Files(shell.mount, STRANGER).write("/machine/modules", "load dm_zero")


def test_a_module_that_is_refused_leaves_nothing_behind(shell: Files, tmp_path: Path) -> None:
    """A module that is refused leaves no dependency loaded, and no file and no descriptor in the guest."""
    tasks = guest_of(shell.mount).tasks
    guest = LinuxSyscalls(tasks)
    *_, (_, module) = debian_kernel.modules(tasks.release).read("dm-zero")
    path = tmp_path / "dm zero.ko"
    # Its signature doesn't fit any more.
    path.write_bytes(module.replace(b"vermagic=6", b"vermagic=7"))

    def lowest() -> int:
        fd = guest.open(tasks.init, "/dev/null", os.O_RDONLY)
        guest.close(tasks.init, fd)
        return fd

    before = guest.listdir("/"), lowest()
    assert shell.errno("/machine/modules", f"load {path}\n") == errno.EKEYREJECTED
    assert (guest.listdir("/"), lowest()) == before
    assert shell.read("/machine/modules") == ""


@pytest.mark.parametrize("text", ["load a\nload b\n", "load /a\0b", "unload a\0", "loads a", ""])
def test_what_is_no_command_for_modules(text: str, refusing: Files) -> None:
    assert refusing.errno("/machine/modules", text) == errno.EINVAL


def test_a_write_to_modules_holds_nobody_up(shell: Files) -> None:
    """A write to machine/modules is reported as one that reads host files, because the module may be on the
    mount itself.
    """
    handle = shell.mount.open(SHELL, "/machine/modules", os.O_WRONLY)
    assert shell.mount.reads_host(handle)
    assert not shell.mount.reads_host(shell.mount.open(SHELL, "/machine/modules", os.O_RDONLY))
    read = shell.mount.open(SHELL, "/machine/modules", os.O_RDONLY)
    assert shell.mount.fgetattr(read).mode == shell.mount.getattr("/machine/modules").mode


def test_tracefs_can_be_the_root() -> None:
    mount = debian_kernel.mount(is_tracefs=True)
    assert "p[:[<group>/][<event>]]" in Files(mount, SHELL).read("/README")
    mount.close()
    with pytest.raises(KernelError) as refused:
        mount.getattr("/README")
    assert refused.value.errno == errno.EIO


def test_a_dead_guest_answers_eio_and_says_why(shell: Files) -> None:
    mount = shell.mount
    assert not mount.is_dead()
    assert "Linux version 6." in shell.read("/machine/dmesg")
    tasks = guest_of(mount).tasks
    with pytest.raises(GuestFault):
        tasks.exit(tasks.init)
    assert mount.is_dead()
    with pytest.raises(KernelError) as refused:
        shell.read("/kprobe_events")
    assert refused.value.errno == errno.EIO
    assert "Attempted to kill init" in shell.read("/machine/dmesg")


@pytest.mark.parametrize("count", [40_000, 1 << 20, 1 << 62])
def test_a_kernel_that_says_it_has_given_more(
    count: int, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a damaged kernel returns more bytes than a request asked for, the request fails with EIO."""
    handle = mount.create(SHELL, "/scratch/file", 0o600, os.O_RDWR)
    assert mount.write(SHELL, handle, b"some text", 0) == 9
    mount.symlink(SHELL, "/scratch/link", "file")
    with monkeypatch.context() as patch:
        patch.setattr(guest_of(mount).syscalls, "_call", lambda *_arguments, **_options: count)
        for ask in (
            lambda: mount.read(SHELL, handle, 4, 0),
            lambda: mount.readlink(SHELL, "/scratch/link"),
            lambda: mount.readdir("/scratch"),
        ):
            with pytest.raises(KernelError) as refused:
                ask()
            assert refused.value.errno == errno.EIO
    assert mount.read(SHELL, handle, 4, 0) == b"some"
    mount.release(handle)


def test_entries_of_a_directory_that_are_none() -> None:
    """A directory entry of zero bytes is refused, because a loop over such entries would not end."""
    with pytest.raises(KernelError, match="entries of a directory that are none"):
        list(syscalls._entries(bytes(64), 0))
    assert list(syscalls._entries(bytes(10), 0)) == []


@pytest.mark.parametrize(
    ("path", "flags"), [("/scratch/appended", os.O_CREAT), ("/tracing/set_event_pid", 0)]
)
def test_a_seek_after_an_appending_write(shell: Files, path: str, flags: int) -> None:
    """A read after an appending write returns data from the offset of the request, not from the end of the
    file.
    """
    mount = shell.mount
    if flags:
        mount.release(mount.create(SHELL, path, 0o600, os.O_WRONLY))
    handle = mount.open(SHELL, path, os.O_RDWR | os.O_APPEND)
    text = b"4711\n"
    assert mount.write(SHELL, handle, text, 0) == len(text)
    assert mount.read(SHELL, handle, 100, len(text)) == b""
    assert mount.read(SHELL, handle, 100, 0) == text
    mount.release(handle)
    mount.release(mount.open(SHELL, "/tracing/set_event_pid", os.O_WRONLY | os.O_TRUNC))


def test_the_core_of_the_guest(mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """machine/vmcore is a core with headers for RAM.

    Its open is limited to root and the owner, and to MAX_OPEN at once.
    """
    monkeypatch.setattr(native_mount, "MAX_OPEN", 1)
    path = "/machine/vmcore"
    for client, flags, error in ((STRANGER, os.O_RDONLY, errno.EACCES), (SHELL, os.O_WRONLY, errno.EACCES)):
        with pytest.raises(KernelError) as caught:
            mount.open(client, path, flags)
        assert caught.value.errno == error
    handle = mount.open(SHELL, path, os.O_RDONLY)
    with pytest.raises(KernelError) as caught:
        mount.open(SHELL, path, os.O_RDONLY)
    assert caught.value.errno == errno.EBUSY
    size = mount.getattr(path).size
    copy = tmp_path / "core"
    copy.write_bytes(mount.read(SHELL, handle, RAM_OFFSET, 0))
    os.truncate(copy, size)
    mount.release(handle)
    mount.release(mount.open(SHELL, path, os.O_RDONLY))
    with copy.open("rb") as file:
        core = CoreFile(file.fileno())
    assert core.vmcoreinfo["OSRELEASE"] in Files(mount, SHELL).read("/machine/version")
    assert 64 << 20 < core.end <= size - RAM_OFFSET


def test_an_exit_reaches_a_client_that_waits_for_records(mount: Mount, shell: Files, host: Host) -> None:
    """follow_processes replays an exit without a client's request, and wakes a client that polls
    trace_pipe.
    """
    Files(mount, OTHER).read("/tracing/trace_clock")
    shell.write("/tracing/events/sched/sched_process_exit/enable", "1")
    pipe = mount.open(SHELL, "/tracing/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
    woken: list[bool] = []
    assert mount.poll(pipe, lambda: woken.append(True)) == 0
    mount.follow_processes()
    assert woken == []
    host.ended.append(OTHER.pid)
    mount.follow_processes()
    assert woken == [True]
    assert f"sched_process_exit: comm=cat pid={OTHER.pid} " in mount.read(SHELL, pipe, 4096, 0).decode()
    mount.release(pipe)


def test_a_name_reaches_the_task_before_its_exit(mount: Mount, shell: Files, host: Host) -> None:
    """A child that executes a program ends with the program's name, also if no request comes meanwhile."""
    shell.write("/tracing/events/sched/sched_process_exit/enable", "1")
    pipe = mount.open(SHELL, "/tracing/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert mount.poll(pipe, lambda: None) == 0
    host.names[4003] = "sh"
    host.forked.append(Fork(4003, SHELL.pid, "sh", 0, 0, alive=True))
    mount.follow_processes()
    host.names[4003] = "sleep"
    mount.follow_processes()
    del host.names[4003]
    host.ended.append(4003)
    mount.follow_processes()
    assert "sched_process_exit: comm=sleep pid=4003 " in mount.read(SHELL, pipe, 4096, 0).decode()
    mount.release(pipe)
