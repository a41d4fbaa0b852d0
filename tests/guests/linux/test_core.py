"""Mounts of dumps: calls, files and probes in the dumped kernel, and refusals of calls that cannot run."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from emulated_kernel.guests.common import spill_file
from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
from emulated_kernel.guests.linux.vmcore import vmcore_files, vmcore_guest, vmcore_image
from emulated_kernel.guests.linux.vmcore.vmcore_guest import ensure_core_cached, started_core
from emulated_kernel.guests.linux.vmcore.vmcore_mount import vmcore_mount
from emulated_kernel.image.linux import vmcore
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.core.open_file import ALWAYS_READY
from emulated_kernel.vfs.mount import Mount
from kprobefs.cli.main import main
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.daemon.backends import build_kernel, prepare
from kprobefs.mount_options import MountOptions
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, daemon, needs_fuse
from tests.guests.linux import core_dump, debian_kernel
from tests.guests.linux.core_dump import NUMBERS, TEXT
from tests.guests.linux.files import Files
from tests.guests.linux.parts import core, core_files
from tests.sample import share

PAGE = bytes(4096)
CLIENT = Client(4242, 0, 0)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a dump of Debian's kernel, in a directory that serves as a cache."""
    path = tmp_path_factory.mktemp("dumped") / "core"
    tasks = debian_kernel.tasks()
    core_dump.dump_of(tasks, path, has_info=True)
    tasks.machine.close()
    return path


@pytest.fixture(scope="module")
def mount(dumped: Path) -> Iterator[Mount]:
    """Yield a mount of the dump, which is started from the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(dumped.parent))
        ensure_core_cached(str(dumped))
        (kept,) = snapshot.cached()
        guest, kernel = started_core(str(dumped))
        assert (kept.source, kept.release) == (str(dumped), kernel.release)
    made = vmcore_mount(guest, KernelEngine(guest, kernel), Owner(0, 0), is_tracefs=False)
    yield made
    made.close()


@pytest.fixture
def shell(mount: Mount) -> Files:
    return Files(mount, CLIENT)


def test_functions_are_called(shell: Files) -> None:
    assert shell.call('strlen "hello"') == "strlen = 0x5 (5)\n"
    assert shell.call("int_sqrt 144") == "int_sqrt = 0xc (12)\n"
    assert shell.call('strcmp "a" "b"').startswith("strcmp = 0xffffffff (")
    assert "no symbol named nothing" in shell.call("nothing 1")
    assert "is not a function" in shell.call("jiffies")
    assert "takes 4 arguments, not 1" in shell.call("vfs_read 0")
    spinlock = int(shell.call("__kmalloc 64 0xdc0").split()[2], 16)
    for way in ("", "_irq", "_bh"):
        # One returns with interrupts off.
        assert shell.call(f"_raw_spin_lock{way} {spinlock}").startswith(f"_raw_spin_lock{way} = ")
        assert shell.call(f"_raw_spin_unlock{way} {spinlock}").startswith(f"_raw_spin_unlock{way} = ")
    for text in ("said to the dump", "and its line ended"):
        assert shell.call(f'_printk "{text}"').startswith("_printk = ")
    assert "said to the dump" in shell.read("/machine/dmesg")


def test_the_flag_by_which_a_task_is_asked_to_reschedule(mount: Mount) -> None:
    """The bit number of TIF_NEED_RESCHED is the same, whether found for the dump or for the booted kernel."""
    guest = core(mount).guest
    tasks = debian_kernel.tasks()
    assert guest.need_resched == tasks.need_resched
    assert guest.need_resched.bit_count() == 1
    tasks.machine.close()


def test_files_are_read(shell: Files, mount: Mount) -> None:
    assert shell.read("/files/scratch/dir/note") == TEXT
    assert shell.read("/files/scratch/numbers") == NUMBERS
    assert "Linux version 6.1" in shell.read("/files/proc/version")
    names = {entry.name: entry.kind for entry in mount.readdir("/files/scratch")}
    assert names == {
        ".": stat.S_IFDIR,
        "..": stat.S_IFDIR,
        "dir": stat.S_IFDIR,
        "numbers": stat.S_IFREG,
        "link": stat.S_IFLNK,
        **dict.fromkeys(core_dump.SPECIAL, stat.S_IFREG),
        **dict.fromkeys(("absolute", "root", "out", "around"), stat.S_IFLNK),
    }
    assert mount.readlink(CLIENT, "/files/scratch/link") == "dir/note"
    note = mount.getattr("/files/scratch/dir/note")
    assert (stat.S_IMODE(note.mode), note.size, note.blocks) == (0o440, len(TEXT), 8)
    # The guest's time begins in January 2024.
    assert all(time // 10**15 == 1704 for time in (note.atime_ns, note.mtime_ns, note.ctime_ns))
    # The kernel itself may not read this file.
    assert shell.read("/files/proc/1/oom_score_adj") == "0\n"
    assert mount.readlink(CLIENT, "/files/proc/1/exe") == "../../init"
    assert "files" in {entry.name for entry in mount.readdir("/")}
    for path, error in (
        ("/files/scratch/none", errno.ENOENT),
        ("/files/scratch/numbers/x", errno.ENOTDIR),
        ("/files/proc/self/stat", errno.ENOENT),
    ):
        with pytest.raises(KernelError) as refused:
            mount.getattr(path)
        assert refused.value.errno == error


def test_files_are_not_changed(mount: Mount) -> None:
    note = "/files/scratch/dir/note"
    for change in (
        lambda: mount.open(CLIENT, note, os.O_WRONLY),
        lambda: mount.create(CLIENT, "/files/scratch/new", 0o600, os.O_WRONLY),
        lambda: mount.truncate(CLIENT, note, 0),
        lambda: mount.unlink(CLIENT, note),
        lambda: mount.rename(CLIENT, note, "/files/scratch/other"),
        lambda: mount.mkdir(CLIENT, "/files/scratch/d", 0o700),
        lambda: mount.rmdir(CLIENT, "/files/scratch/dir"),
        lambda: mount.chmod(CLIENT, note, 0o777),
        lambda: mount.chown(CLIENT, note, 1, 1),
        lambda: mount.utimens(CLIENT, note, 0, 0),
        lambda: mount.symlink(CLIENT, "/files/l", "x"),
    ):
        with pytest.raises(KernelError) as refused:
            change()
        assert refused.value.errno == errno.EROFS


def test_probes_hit(shell: Files) -> None:
    """Probes at entries, inside functions and at returns hit in called functions and in reads of the dump's
    files.
    """
    assert "int_sqrt" in shell.read("/tracing/available_filter_functions").splitlines()
    shell.write(
        "/kprobe_events",
        "p:entry vfs_read count=$arg3\np:inside vfs_read+5\nr:root int_sqrt $retval\n"
        "p:named filp_open name=+0($arg1):string\n",
    )
    shell.write("/tracing/events/kprobes/enable", "1")
    shell.call("int_sqrt 144")
    shell.read("/files/proc/version")
    lines = shell.read("/tracing/trace").splitlines()
    assert any(" root: " in line and "arg1=0xc" in line for line in lines)
    assert any('name="/proc/version"' in line for line in lines)
    assert sum(" entry: " in line for line in lines) == sum(" inside: " in line for line in lines) > 1
    assert "vfs_read" in shell.read("/kprobes/list")
    shell.write("/tracing/events/kprobes/enable", "0")
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    assert shell.read("/kprobes/list") == ""


def test_limits(shell: Files) -> None:
    before = shell.read("/machine/limits")
    try:
        shell.write("/machine/limits", "instances 0\n")
        with pytest.raises(KernelError) as refused:
            shell.mount.mkdir(CLIENT, "/tracing/instances/more", 0o755)
        assert refused.value.errno == errno.ENOSPC
    finally:
        shell.write("/machine/limits", "instances 1024\n")
    assert shell.read("/machine/limits").split()[::3] == before.split()[::3]


def test_links_stay_in_the_dump(mount: Mount) -> None:
    """Absolute and relative links in a dump lead to files of the dump, never to files of the host."""
    links = {"absolute": "../proc/version", "root": "..", "out": "../etc/passwd", "around": "../etc"}
    assert {name: mount.readlink(CLIENT, f"/files/scratch/{name}") for name in links} == links
    assert mount.readlink(CLIENT, "/files/scratch/dir/deep") == "../numbers"


def test_who_asks(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each request that runs code of the dump, the machine gets a function that returns whether the
    client is dying.
    """
    asked = list[bool]()
    wanted_until = core(mount).guest.machine.wanted_until

    def noted(is_unwanted: Callable[[], bool]) -> AbstractContextManager[None]:
        asked.append(is_unwanted())
        return wanted_until(is_unwanted)

    monkeypatch.setattr(core(mount).guest.machine, "wanted_until", noted)
    monkeypatch.setattr(mount.lock, "is_dying", lambda thread: thread == threading.get_ident())
    note, directory = "/files/scratch/dir/note", mount.opendir(CLIENT, "/files/scratch")
    handle = mount.open(CLIENT, note, os.O_RDONLY)
    for ask in (
        lambda: mount.getattr(note, lambda: CLIENT),
        lambda: mount.fgetattr(handle, lambda: CLIENT),
        lambda: mount.fgetattr(directory, lambda: CLIENT),
        lambda: mount.getdents(CLIENT, directory, 0),
        lambda: mount.read(CLIENT, handle, 1, 0),
        lambda: mount.readlink(CLIENT, "/files/scratch/link"),
    ):
        asked.clear()
        ask()
        assert asked == [True]
    mount.release(handle)
    mount.release(directory)


def test_what_the_host_would_open(mount: Mount) -> None:
    """FIFOs, sockets and devices of a dump are shown as regular files, so that the host does not open its own
    devices.
    """
    kinds = {entry.name: entry.kind for entry in mount.readdir("/files/scratch")}
    for name in core_dump.SPECIAL:
        path = f"/files/scratch/{name}"
        assert kinds[name] == stat.S_IFMT(mount.getattr(path).mode) == stat.S_IFREG
        with pytest.raises(KernelError) as refused:
            mount.open(CLIENT, path, os.O_RDONLY)
        # Linux never opens a socket.
        assert refused.value.errno == (errno.ENXIO if name == "socket" else errno.EACCES)
    assert stat.S_IFMT(mount.getattr("/files/dev/null").mode) == stat.S_IFREG
    assert {entry.name: entry.kind for entry in mount.readdir("/files/dev")}["null"] == stat.S_IFREG


@pytest.mark.parametrize(("kind", "shown"), [(0, 0), (1, stat.S_IFREG), (4 | 1 << 31, stat.S_IFDIR)])
def test_kinds_that_file_systems_tell(
    kind: int, shown: int, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory entry has the file type that the file system passes, or no type if this type is 0.

    Flags that the kernel adds to the type are ignored.
    """
    entry = vmcore_files._ENTRY.pack(5, kind, 4) + b"name"
    monkeypatch.setattr(core_files(mount).files, "readdir", lambda _path: [*vmcore_files._entries(entry, 0)])
    assert [found.kind for found in mount.readdir("/files/scratch")] == [shown]


def test_long_directories(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sorted(entry.name for entry in mount.readdir("/files/proc"))
    monkeypatch.setattr(vmcore_files, "_LISTING", 1024)
    assert sorted(entry.name for entry in mount.readdir("/files/proc")) == whole
    assert len(whole) > 1024 // 24


def test_open_files(mount: Mount) -> None:
    """Each request on an open file of a dump is answered, or refused with the right errno."""
    handle = mount.open(CLIENT, "/files/scratch/dir/note", os.O_RDONLY)
    directory = mount.opendir(CLIENT, "/files/scratch")
    assert mount.fgetattr(handle).size == len(TEXT)
    assert stat.S_ISDIR(mount.fgetattr(directory).mode)
    assert "numbers" in {entry.name for entry in mount.getdents(CLIENT, directory, 2)}
    assert mount.read(CLIENT, handle, 4, 5) == mount.read_page(CLIENT, handle, 4, 5) == TEXT[5:9].encode()
    assert mount.poll(handle, None) == ALWAYS_READY
    assert not mount.is_stream(handle)
    assert not mount.reads_host(handle)
    mount.set_status_flags(handle, os.O_NONBLOCK)
    mount.wait(handle, 0)
    mount.give_up(CLIENT, handle, errno.EINTR)
    mount.fsync(CLIENT, handle)
    for error, refused in (
        (errno.EINVAL, lambda: mount.ftruncate(CLIENT, handle, 0)),
        (errno.EBADF, lambda: mount.write(CLIENT, handle, b"x", 0)),
        (errno.EBADF, lambda: mount.fsync(CLIENT, handle + 1000)),
        (errno.EBADF, lambda: mount.poll(handle + 1000, None)),
    ):
        with pytest.raises(KernelError) as found:
            refused()
        assert found.value.errno == error
    mount.release(directory)
    mount.release(handle)
    with pytest.raises(KernelError) as found:
        mount.fgetattr(handle)
    assert found.value.errno == errno.EBADF


@contextmanager
def replaced(mount: Mount, function: str, code: str) -> Iterator[None]:
    """Replace the code of a kernel function by `code`, in hex digits, during the block."""
    machine = core(mount).guest.machine
    at = machine.memory.translate(core(mount).guest.root, lookup(mount, function))
    there = slice(at, at + len(code) // 2)
    before = machine.memory.ram[there]

    def put(text: bytes) -> None:
        machine.memory.ram[there] = text
        machine.engine.flush_code()

    put(bytes.fromhex(code))
    try:
        yield
    finally:
        put(before)


def lookup(mount: Mount, name: str) -> int:
    address = core(mount).engine.kernel.kallsyms.lookup_name(name)
    assert address is not None
    return address


MOV, RET = "b8", "c3"


def test_a_kernel_that_says_it_has_read_more(mount: Mount) -> None:
    """If the dump's kernel returns more bytes than a request asked for, the request fails with EIO."""
    handle = mount.open(CLIENT, "/files/scratch/numbers", os.O_RDONLY)
    for count in (17, 4096, 0x3F000, 0x7FFFFFFF):
        with replaced(mount, "vfs_read", f"{MOV}{count.to_bytes(4, 'little').hex()}{RET}"):
            with pytest.raises(KernelError) as refused:
                mount.read(CLIENT, handle, 16, 0)
            assert refused.value.errno == errno.EIO
    with (
        replaced(mount, "vfs_readlink", f"{MOV}01100000{RET}"),
        pytest.raises(KernelError, match="4097 bytes or entries where 4096 fit"),
    ):
        mount.readlink(CLIENT, "/files/scratch/link")
    assert mount.read(CLIENT, handle, 16, 0) == NUMBERS[:16].encode()
    mount.release(handle)


def test_a_kernel_that_asks_to_be_scheduled_for_ever(
    shell: Files, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that calls the scheduler forever is stopped and undone, although each run of the guest
    is short.
    """
    schedule = lookup(mount, "__schedule") - (lookup(mount, "int_sqrt") + 10) & 0xFFFFFFFF
    again = f"bf01000000e8{schedule.to_bytes(4, 'little').hex()}ebf4"
    shell.call('strlen "hello"')
    before = memory(mount)
    monkeypatch.setattr(snapshot, "BUDGET", 0.5)
    with replaced(mount, "int_sqrt", again):
        assert shell.call("int_sqrt 144").startswith("EIO int_sqrt: what was asked for takes too long")
    assert memory(mount) == before
    assert shell.call("int_sqrt 144") == "int_sqrt = 0xc (12)\n"


ADD_TO_STOP = "48834610"


@pytest.mark.parametrize("size", [1, 16])
def test_a_directory_without_end(size: int, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing is stopped with EIO if each call returns further bytes without end.

    The cases return one byte, less than an entry, or 16 bytes.
    """
    monkeypatch.setattr(snapshot, "BUDGET", 0.5)
    with (
        replaced(mount, "iterate_dir", f"{ADD_TO_STOP}{size:02x}31c0{RET}"),
        pytest.raises(KernelError) as refused,
    ):
        mount.readdir("/files/scratch")
    assert refused.value.errno == errno.EIO
    monkeypatch.undo()
    assert "numbers" in {entry.name for entry in mount.readdir("/files/scratch")}


def test_ftraces_pages_in_a_circle(dumped: Path, mount: Mount) -> None:
    """A circular list of ftrace pages is refused, because its records would fill the memory of the host."""
    memory, root = core(mount).guest.machine.memory, core(mount).guest.root
    with dumped.open("rb") as file:
        info = vmcore.CoreFile(file.fileno()).vmcoreinfo
    kernel, _ = vmcore_image._kernel_in(memory.ram, *vmcore_image._located(memory.ram, info))
    page = memory.read_word(root, lookup(mount, "ftrace_pages_start"))
    at = page + kernel.btf.offset("ftrace_page.next")
    before = memory.read(root, at, 8)
    try:
        memory.write(root, at, struct.pack("<Q", page))
        with pytest.raises(KernelError, match="has no end"):
            _ = kernel.mcount
    finally:
        memory.write(root, at, before)
    assert len(kernel.mcount) > 1000


def memory(mount: Mount) -> bytes:
    """Return the memory of the guest, without the host's part."""
    return core(mount).guest.machine.memory.ram[:-HOST_SIZE]


@pytest.mark.parametrize(
    ("line", "error", "why"),
    [
        ("msleep 10", "EDEADLK", "(__schedule < schedule < schedule_timeout < msleep)"),
        ("strlen 16", "EFAULT", "page fault for address 0x10 at strlen"),
        ("mutex_lock 8", "EFAULT", "page fault"),
        ('panic "by hand"', "EFAULT", "it panicked: by hand"),
        ("do_exit 0", "EFAULT", "it ends its task"),
    ],
)
def test_what_can_not_run_has_not_been(line: str, error: str, why: str, shell: Files, mount: Mount) -> None:
    """A call that cannot run is refused with the reason.

    Memory is then as before the call. Locks that the call has taken are free again.
    """
    shell.call('strlen "hello"')
    before = memory(mount)
    said = shell.call(line)
    assert said.startswith(f"{error} ")
    assert why in said
    assert memory(mount) == before
    assert shell.call('strlen "hello"') == "strlen = 0x5 (5)\n"


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (MemoryFault(0x123), r"isn't there: 0x123"),
        (HardwareError("no room"), "no room"),
        (KeyboardInterrupt("now"), "now"),
    ],
)
def test_what_the_host_meets_is_taken_back(
    raised: BaseException, seen: str, shell: Files, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.call('strlen "hello"')
    before, run = memory(mount), core(mount).guest.machine.run

    def fails() -> None:
        run()
        raise raised

    with monkeypatch.context() as patch:
        patch.setattr(core(mount).guest.machine, "run", fails)
        with pytest.raises((KernelError, HardwareError, KeyboardInterrupt), match=seen):
            core(mount).calls.call_function("__kmalloc", 64, 3520)
    assert memory(mount) == before


def test_probes_that_a_refused_call_hits_first(
    shell: Files, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a refused call is undone, the patches that first hits have made stay, and later hits are still
    counted.
    """
    text, optimizer = core(mount).engine.machine.text, core(mount).engine.kprobes.optimizer
    assert optimizer is not None
    poked: dict[int, int] = {}
    poke = text._write

    def remembered(va: int, data: bytes) -> None:
        poke(va, data)
        poked.update(enumerate(data, va))

    monkeypatch.setattr(text, "_write", remembered)
    shell.write("/kprobe_events", "p:entry msleep\np:inside msleep+5\n")
    shell.write("/tracing/events/kprobes/enable", "1")
    with mount.lock:
        optimizer.work.flush()
    msleep = core(mount).engine.kernel.kallsyms.lookup_name("msleep")
    assert msleep is not None
    armed = text.current(msleep, 16)
    for count in (1, 2, 3):
        assert shell.call("msleep 10").startswith("EDEADLK ")
        profile = [line.split() for line in shell.read("/kprobe_profile").splitlines()]
        assert [row[1:] for row in profile] == [[str(count), "0"]] * 2
        assert [at for at, byte in poked.items() if text.current(at, 1)[0] != byte] == []
    # Both handlers are compiled now, and the call and the jump lead to the compiled code.
    assert text.current(msleep, 16) != armed
    shell.write("/tracing/events/kprobes/enable", "0")
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    assert not text.ledger


def test_a_lock_that_is_held(shell: Files) -> None:
    """A call that needs a lock which an earlier call has taken is refused, because the call would wait
    forever.
    """
    place = shell.call("__kmalloc 64 3520").split()[2]
    assert shell.call(f"memset {place} 0 64").startswith("memset = ")
    assert shell.call(f"_raw_spin_lock {place}").startswith("_raw_spin_lock = ")
    said = shell.call(f"_raw_spin_lock {place}")
    assert said.startswith("EDEADLK ")
    assert "a lock that somebody in the dump holds" in said


def test_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump without a VMCOREINFO note is mounted without a cache. VMCOREINFO is found in memory, and holes
    are not read.

    The dump's conversion of the TSC would give a time before the boot, but the guest's time is positive.
    """
    tasks, booted = debian_kernel.with_kernel()
    scales = booted.kallsyms.lookup_name("cyc2ns")
    assert scales is not None
    for offset in (8, 24):
        at = tasks.per_cpu + scales + booted.btf.offset("cyc2ns.data") + offset
        tasks.machine.memory.write(tasks.root, at, struct.pack("<q", -(10**15)))
    core_dump.dump_of(tasks, tmp_path / "core", has_info=False, hole=range(256 << 20, 3 << 29))
    tasks.machine.close()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/sys")
    read = 0
    pread = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        nonlocal read
        read += size
        return pread(file, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", counted)
        guest, kernel = started_core(str(tmp_path / "core"))
    assert 48 << 20 < read < 600 << 20
    # The mount has the contents that were read, even if the file changes.
    os.truncate(tmp_path / "core", 0)
    mount = vmcore_mount(guest, KernelEngine(guest, kernel), Owner(0, 0), is_tracefs=True)
    assert 0 < guest.time <= core(mount).engine.machine.clock.now_ns() < guest.time + 10**9
    assert "int_sqrt" in Files(mount, CLIENT).read("/available_filter_functions").splitlines()
    shell = Files(mount, CLIENT)
    shell.write("/.control/machine/call", "int_sqrt 81\n")
    assert shell.read("/.control/machine/call") == "int_sqrt = 0x9 (9)\n"
    # A call that loops is stopped and undone.
    guest.machine._watchdog.budget = 0.5
    assert shell.errno("/.control/machine/call", "__delay 0x7fffffffffffffff\n") == errno.EIO
    assert "it ran for too long" in shell.read("/.control/machine/call")
    shell.write("/.control/machine/call", "int_sqrt 64\n")
    assert shell.read("/.control/machine/call") == "int_sqrt = 0x8 (8)\n"
    mount.close()
    assert [path.name for path in tmp_path.iterdir()] == ["core"]


@pytest.mark.usefixtures("mount")
def test_coverage_counts_the_kernel_of_a_dump(
    dumped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(dumped.parent))
    assert main(["coverage", "--vmcore", str(dumped), "--function", "vfs_*", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert "a dump" in found["subject"]
    assert found["verdicts"]["instructions"] > 1000
    assert {each["name"] for each in found["symbols"]} >= {"vfs_read", "vfs_write"}


def test_no_room(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a dump is too large for the cache and for temporary files, one line of error names the remedy."""
    monkeypatch.setattr(snapshot, "LIMIT", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/sys")
    monkeypatch.setattr(spill_file, "_MARGIN", 1 << 60)
    options = MountOptions(str(dumped.parent), MachineConfig(), vmcore=str(dumped))
    prepare(options)
    with pytest.raises(CliError, match=r"no room for \d+ MiB in /.*/tmp: set TMPDIR") as refused:
        build_kernel(options)
    assert refused.value.status == ExitStatus.USAGE


@pytest.mark.usefixtures("mount")
def test_page_tables_that_lead_nowhere(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump whose page tables lack a part of the kernel's text is refused as not usable."""
    read = snapshot.read

    def damaged(file: int, *, with_parts: bool, is_checked: bool = True) -> snapshot.SnapshotContents | None:
        kept = read(file, with_parts=with_parts, is_checked=is_checked)
        assert kept is not None
        table = kept.about["facts"]["root"]
        for slot in (511, 510):
            table = struct.unpack_from("<Q", kept.ram, table + 8 * slot)[0] & 0xFFFFFFFFFF000
        struct.pack_into("<Q", kept.ram, table + 8 * 10, 0)
        return kept

    monkeypatch.setenv("XDG_CACHE_HOME", str(dumped.parent))
    monkeypatch.setattr(snapshot, "read", damaged)
    options = MountOptions(str(dumped.parent), MachineConfig(), vmcore=str(dumped))
    with pytest.raises(
        CliError, match="not a usable dump: 0xffffffff81400000 is not in its memory"
    ) as refused:
        build_kernel(options)
    assert refused.value.status == ExitStatus.USAGE


@pytest.mark.usefixtures("mount")
def test_what_was_kept_of_a_dump_with_a_text_for_an_address(
    dumped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cached form of a dump has a string in place of an address, the cached form is removed and made
    again.
    """
    subprocess.run(["cp", "-a", "--sparse=always", dumped.parent / "kprobefs", tmp_path], check=True)
    read, damaged = snapshot.read, []

    def first_damaged(
        file: int, *, with_parts: bool, is_checked: bool = True
    ) -> snapshot.SnapshotContents | None:
        kept = read(file, with_parts=with_parts, is_checked=is_checked)
        if kept is not None and not damaged:
            kept.about["facts"]["symbols"]["do_sync_core"] = ""
            damaged.append(file)
        return kept

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (before,) = snapshot.cached()
    monkeypatch.setattr(snapshot, "read", first_damaged)
    guest, _ = started_core(str(dumped))
    guest.machine.close()
    assert damaged
    assert not before.path.exists()


POISON = 0xCCCCCCCCCCCCCCCC
"""Word that fills memory which the kernel has freed after its start."""


DAMAGE = [
    (symbol, value)
    for symbol in ("ftrace_events", "ftrace_pages_start", "kprobe_blacklist")
    for value in (8, POISON, 0xFFFFFFFFFFFFFFF8)
]


@pytest.mark.parametrize(("symbol", "value"), share(DAMAGE, 0, 4))
def test_a_damaged_list_is_a_line(
    symbol: str,
    value: int,
    dumped: Path,
    mount: Mount,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A dump with a damaged list is refused by one line of error.

    The line does not show a poison value as if it were an address.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    damaged = tmp_path / "core"
    subprocess.run(["cp", "--sparse=always", dumped, damaged], check=True)
    with damaged.open("r+b") as file:
        core_file = vmcore.CoreFile(file.fileno())
        base = int(core_file.vmcoreinfo["NUMBER(phys_base)"]) - 0xFFFFFFFF80000000
        place = lookup(mount, symbol) + base
        at = next(start + place - pa for pa, start, size in core_file.segments if pa <= place < pa + size)
        os.pwrite(file.fileno(), struct.pack("<Q", value), at)
    (tmp_path / "mnt").mkdir()
    status = main(["mount", "--vmcore", str(damaged), str(tmp_path / "mnt")])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"kprobefs: {damaged}: not a usable dump: ")
    assert f"{POISON:#x}" not in err


@pytest.mark.usefixtures("mount")
def test_a_refusal_is_no_damage(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cached dump is refused, the cached form stays, and is not made again."""

    def refused(*_given: object) -> None:
        raise vmcore.unusable_core("by hand")

    monkeypatch.setenv("XDG_CACHE_HOME", str(dumped.parent))
    monkeypatch.setattr(vmcore_guest, "VmcoreGuest", refused)
    monkeypatch.setattr(vmcore_guest, "convert", lambda _path: pytest.fail("made again"))
    with pytest.raises(KernelError, match="by hand"):
        started_core(str(dumped))
    assert len(snapshot.cached()) == 1


def test_after_the_end(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(dumped.parent))
    guest, kernel = started_core(str(dumped))
    mount = vmcore_mount(guest, KernelEngine(guest, kernel), Owner(0, 0), is_tracefs=False)
    mount.close()
    for asked in (lambda: mount.getattr("/files"), lambda: mount.readdir("/files")):
        with pytest.raises(KernelError) as refused:
            asked()
        assert refused.value.errno == errno.EIO


def test_a_call_ends_with_its_client(shell: Files, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose client is killed is stopped, although its time is not over, and memory is as before."""
    shell.call('strlen "hello"')
    before, asked = memory(mount), list[int]()
    monkeypatch.setattr(core(mount).guest.machine._watchdog, "budget", 1000.0)

    def is_dying(thread: int) -> bool:
        asked.append(thread)
        return len(asked) > 2

    with monkeypatch.context() as patch:
        patch.setattr(mount.lock, "is_dying", is_dying)
        assert shell.errno("/machine/call", "__delay 0x7fffffffffffffff\n") == errno.EIO
    assert "its client was killed" in shell.read("/machine/call")
    assert set(asked) == {threading.get_ident()}
    assert memory(mount) == before
    assert shell.call("int_sqrt 144") == "int_sqrt = 0xc (12)\n"


SCRIPT = r"""
set -e
cd "$1"
cat files/scratch/dir/note files/scratch/link
find files/scratch | sort
head -n 2 files/scratch/numbers
grep -c 'Linux version' files/proc/version
cat files/scratch/fifo 2> /dev/null && exit 1
(echo more >> files/scratch/numbers) 2> /dev/null && exit 1
echo 'p:opened filp_open path=+0($arg1):string' > kprobe_events
echo 1 > tracing/events/kprobes/enable
cat files/scratch/dir/note > /dev/null
grep -c 'opened: (filp_open+0x0/0x[0-9a-f]*) path="/scratch/dir/note"' tracing/trace > ../opened
test "$(cat ../opened)" -gt 0
echo 'int_sqrt 144' > machine/call
cat machine/call
(echo 'msleep 1' > machine/call) 2> /dev/null && exit 1
cut -d'(' -f1 machine/call
"""


@needs_fuse
@pytest.mark.mounted
def test_a_walk_through_a_mount(dumped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(dumped.parent))
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))
    directory = tmp_path / "mnt"
    directory.mkdir()
    with daemon(directory, "--vmcore", str(dumped), program=REAL_PROGRAM) as mounted:
        done = subprocess.run(
            ["sh", "-c", SCRIPT, "sh", str(directory)],
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert mounted.log.count("\n") <= 2
        killed = "echo '__delay 0x7fffffffffffffff' > machine/call & sleep 1; kill -9 $!; wait $!; echo $?"
        done_with = subprocess.run(
            ["sh", "-c", killed], cwd=directory, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        # The call would go on for 20 s.
        assert done_with.stdout == "137\n"
        assert (directory / "files/scratch/dir/note").read_text() == TEXT
    assert (
        done.stdout
        == f"""{TEXT}{TEXT}files/scratch
files/scratch/absolute
files/scratch/around
files/scratch/dir
files/scratch/dir/deep
files/scratch/dir/note
files/scratch/fifo
files/scratch/link
files/scratch/numbers
files/scratch/out
files/scratch/root
files/scratch/socket
line 0
line 1
1
int_sqrt = 0xc (12)
msleep: it sleeps, and nothing else runs in a dump{" "}
"""
    )


@pytest.mark.usefixtures("mount")
def test_places_of_a_dump_are_explained_without_running_it(
    dumped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain` gives the same verdict, detour and arguments for a dump as for the image.

    For the image, `others` has verdicts for the ways in which boot rewrites returns on other CPU models. For
    the dump, `others` is empty, because boot has rewritten its returns already.
    """
    image = str(debian_kernel.image())
    answers = []
    for option, source in (("--vmcore", str(dumped)), ("--image", image), ("--vmcore", str(dumped))):
        with monkeypatch.context() as patch:
            if option == "--vmcore":
                patch.setenv("XDG_CACHE_HOME", str(dumped.parent))
            assert main(["explain", option, source, "tcp_sendmsg+0x19", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)[0])
    dump, linked, again = answers
    assert dump == again
    assert dump["cpu"].startswith("the CPU of the dump: ")
    assert dump["optimization"] is True
    assert (dump["others"], len(linked["others"])) == ([], 2)
    for key in ("prototype", "verdict", "arguments", "detour", "nearest"):
        assert dump[key] == linked[key]
