"""Requests on control files are system calls of the client's task, once a probe can notice these calls."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Callable, Iterator

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import calls_of, control, guest_of
from tests.guests.linux.probing import MODES, engine

pytestmark = pytest.mark.usefixtures("objects_excluded")

SHELL, OTHER, READER = Client(4001, 0, 0), Client(4002, 0, 0), Client(4003, 0, 0)
EVENTS = "/tracing/events/kprobes"
DEFINITIONS = """\
p:opened do_sys_openat2 name=+0(%si):ustring
r:fd do_sys_openat2 ret=$retval:s64
p:reads vfs_read
r:read ksys_read ret=$retval:s64
p:writes vfs_write data=+0(%si):ustring
r:written ksys_write ret=$retval:s64
r:wrote vfs_write ret=$retval:s64
r:got vfs_read ret=$retval:s64
p:closed filp_close
p:lists iterate_dir
"""
RETURNS = "wrote", "got"
RECORD = re.compile(r"-(\d+) +\[000\].*?: (\w+): \((.*?)\) ?(.*)")


def ours_mount(*, is_tracefs: bool = False) -> Mount:
    return probed_mount(engine(MODES["ftrace"]), ProcessWatch(), Owner(0, 0), is_tracefs=is_tracefs)


@pytest.fixture
def ours() -> Iterator[Mount]:
    mount = ours_mount()
    yield mount
    assert not guest_of(mount).tasks.machine.death
    log = Files(mount, SHELL).read("/machine/dmesg")
    assert "Call Trace" not in log
    assert "cut here" not in log
    mount.close()


def watched(mount: Mount, definitions: str = DEFINITIONS) -> Files:
    shell = Files(mount, SHELL)
    shell.write("/kprobe_events", definitions, os.O_WRONLY | os.O_APPEND)
    shell.write(f"{EVENTS}/enable", "1")
    return shell


def session(files: Files) -> None:
    """Make requests of one process on control files that both kprobefs and the kernel have.

    These files have contents of the same length in both, so that the calls are equal.
    """
    files.read("/tracing/current_tracer")
    files.write("/tracing/tracing_cpumask", "1\n", os.O_WRONLY | os.O_TRUNC)
    files.write("/tracing/trace_marker", "mark")
    for text in ("nonsense", "p:reads vfs_read"):
        with pytest.raises(KernelError):
            files.write("/tracing/kprobe_events", text, os.O_WRONLY | os.O_APPEND)
    with pytest.raises(KernelError):
        files.mount.open(files.client, "/tracing/trace_pipe_none", os.O_RDONLY)
    handle = files.mount.opendir(files.client, "/tracing/events")
    entries = files.mount.getdents(files.client, handle, 0)
    assert files.mount.getdents(files.client, handle, len(entries)) == []
    files.mount.release(handle)
    files.read(f"{EVENTS}/opened/enable")


def recorded(mount: Mount, pid: int) -> list[tuple[str, str]]:
    """Return (event, arguments) for each record of a process, without records of descriptors.

    For events in RETURNS, the arguments begin with the probed function.
    """
    Files(mount, SHELL).write("/tracing/tracing_on", "0")
    text = Files(mount, SHELL).read("/tracing/trace")
    found = [match.groups() for match in map(RECORD.search, text.splitlines()) if match]
    return [
        (event, " ".join((place.partition(" <- ")[0], shown)) if event in RETURNS else shown)
        for who, event, place, shown in found
        if int(who) == pid and (event != "fd" or "=-" in shown)
    ]


def test_calls_are_those_of_the_kernels_own_files(ours: Mount) -> None:
    """Requests on kprobefs's control files make the same system calls, in the same order, as requests on the
    kernel's files.
    """
    answers = []
    for mount in (ours, debian_kernel.mount()):
        shell = watched(mount)
        session(Files(mount, OTHER))
        # The guest closes the client's descriptors before the next request.
        shell.read("/tracing/tracing_on")
        answers.append(recorded(mount, OTHER.pid))
    own, native = answers
    assert ("written", f"ret={-errno.EINVAL}") in own
    assert ("writes", 'data="mark"') in own
    assert [event for event, _ in own].count("lists") == 2
    assert own == native


def test_directories_are_made_and_removed_by_calls(ours: Mount) -> None:
    """mkdir and rmdir have the same results as on the kernel's own tracefs, also if they fail.

    They hit the same probes on vfs_mkdir() and vfs_rmdir().
    """
    steps = (
        *(("mkdir", "instances/one"), ("mkdir", "instances/one"), ("mkdir", "events/none")),
        *(("rmdir", "events/sched"), ("rmdir", "instances/none"), ("rmdir", "instances/one")),
        *(("mkdir", "instances/one"), ("rmdir", "instances/one")),
    )
    answers = []
    for mount in (ours, debian_kernel.mount()):
        # Since Linux 6.15 vfs_mkdir() returns a pointer.
        watched(mount, "p:makes vfs_mkdir\np:removes vfs_rmdir\nr:removed vfs_rmdir ret=$retval:s32\n")
        results = []
        for name, path in steps:
            arguments = (0o755,) if name == "mkdir" else ()
            try:
                getattr(mount, name)(OTHER, f"/tracing/{path}", *arguments)
                results.append(0)
            except KernelError as error:
                results.append(-(error.errno or 0))
        # A removed directory leaves the other directories as they were.
        Files(mount, SHELL).read("/tracing/events/sched/sched_switch/enable")
        answers.append((results, recorded(mount, OTHER.pid)))
    own, native = answers
    assert own == native
    assert [event for event, _ in own[1]].count("makes") == 3
    assert ("removed", f"ret={-errno.EPERM}") in own[1]
    assert ("removed", "ret=0") in own[1]


@pytest.mark.parametrize(
    ("is_ours", "directory"),
    [(True, "/scratch/listed"), (False, "/scratch/listed"), (False, "/tracing/events/sched")],
)
def test_a_client_lists_a_directory_itself(ours: Mount, is_ours: bool, directory: str) -> None:
    """A client lists a directory in the guest with one open. A rewind lists the directory from the
    beginning.
    """
    mount = ours if is_ours else debian_kernel.mount()
    mount.mkdir(OTHER, "/scratch/listed", 0o755)
    mount.release(mount.create(OTHER, "/scratch/listed/file", 0o644, os.O_WRONLY))
    shell = watched(
        mount, "p:opened do_sys_openat2\np:lists iterate_dir\np:seeks ksys_lseek\np:closed filp_close\n"
    )
    handle = mount.opendir(OTHER, directory)
    names = [entry.name for entry in mount.getdents(OTHER, handle, 0)]
    assert names == [entry.name for entry in mount.readdir(directory)]
    assert [entry.name for entry in mount.getdents(OTHER, handle, 1)] == names[1:]
    assert [entry.name for entry in mount.getdents(OTHER, handle, 0)] == names
    mount.release(handle)
    shell.read("/tracing/tracing_on")
    events = [event for event, _ in recorded(mount, OTHER.pid)]
    assert events == ["opened", "lists", "lists", "seeks", "lists", "lists", "closed"]


def test_file_positions_are_those_of_the_kernels_own_files(ours: Mount) -> None:
    """Reads and writes have the same file positions as on the kernel's own files.

    How far a write moves the position depends on the file.
    """
    answers = []
    for mount in (ours, debian_kernel.mount()):
        watched(mount, "p:reads vfs_read pos=+0($arg4):u64\np:writes vfs_write pos=+0($arg4):u64\n")
        handle = mount.open(OTHER, "/tracing/trace_options", os.O_RDONLY)
        for offset in (0, 40, 80):
            mount.read(OTHER, handle, 40, offset)
        mount.release(handle)
        for name, text in (
            ("tracing_on", b"1\n"),
            ("kprobe_events", b"# comment\n"),
            ("set_event", b"!sched:\n"),
        ):
            handle = mount.open(OTHER, f"/tracing/{name}", os.O_RDWR | os.O_APPEND)
            for number in range(3):
                mount.write(OTHER, handle, text, number * len(text))
            mount.read(OTHER, handle, 1, 3 * len(text))
            mount.release(handle)
        answers.append(recorded(mount, OTHER.pid))
    own, native = answers
    assert own == native
    assert [shown for event, shown in own if event == "reads"][:3] == ["pos=0", "pos=40", "pos=80"]


def test_no_call_changes_the_guests_root(ours: Mount) -> None:
    watched(ours, "p:makes vfs_mkdir\np:removes vfs_rmdir\np:reads vfs_read\n")
    for path in ("/kprobes", "/machine", "/none"):
        with pytest.raises(KernelError):
            ours.rmdir(OTHER, path)
    with pytest.raises(KernelError):
        ours.mkdir(OTHER, "/none", 0o755)
    Files(ours, OTHER).read("/kprobes/list")
    Files(ours, OTHER).read("/machine/version")
    assert [event for event, _ in recorded(ours, OTHER.pid)] == ["reads"] * 4


def test_directories_of_events_are_made_while_somebody_sees_it(ours: Mount) -> None:
    """The guest makes the directory of an event only while a probe watches, and removes the directory with
    the event.
    """
    shell = watched(ours, "p:before vfs_read\n")
    append = os.O_WRONLY | os.O_APPEND
    shell.write("/kprobe_events", "p:unseen/one vfs_rmdir\n", append)
    watched(ours, "p:made tracefs_create_dir name=+0($arg1):string\np:gone tracefs_remove\n")
    shell.write("/kprobe_events", "p:grp/new vfs_rmdir\np:grp/other vfs_rmdir\n", append)
    shell.write("/kprobe_events", "-:unseen/one\n-:grp/new\n", append)
    found = re.findall(r": (made|gone): \S+(?: name=(\S+))?", shell.read("/tracing/trace"))
    assert found == [("made", '"grp"'), ("made", '"new"'), ("made", '"other"'), ("gone", "")]
    shell.write(f"{EVENTS}/made/enable", "0")
    shell.write("/kprobe_events", "-:grp/other\n", append)
    assert shell.read("/tracing/trace").count(" gone: ") == 3


def test_records_in_front_of_an_exec_have_the_new_name(ours: Mount) -> None:
    """As on Linux, records before an exec show the new name, which is saved when the task is switched from.

    A later name does not change these records.
    """
    shell = watched(ours, "p:reads vfs_read\n")
    Files(ours, OTHER).read("/tracing/current_tracer")
    with ours.lock:
        task = guest_of(ours).clients.task_of(OTHER)
        guest_of(ours).tasks.set_comm(task, "executed")
    shell.read("/tracing/tracing_on")
    with ours.lock:
        guest_of(ours).tasks.set_comm(task, "later")
    shell.write("/tracing/tracing_on", "0")
    lines = shell.read("/tracing/trace").splitlines()
    assert {line.split("-")[0].strip() for line in lines if f"-{OTHER.pid}" in line} == {"executed"}
    assert f"{OTHER.pid} executed\n" in shell.read("/tracing/saved_cmdlines")


def test_who_arms_the_first_probe_closes_its_file(ours: Mount) -> None:
    shell = watched(ours, "p:closed __x64_sys_close\n")
    shell.read("/tracing/tracing_on")
    assert recorded(ours, SHELL.pid).count(("closed", "")) >= 1
    assert ("closed", "") not in recorded(ours, 1)


def test_hits_are_counted_as_by_its_own_kprobes(ours: Mount) -> None:
    counts = []
    native = debian_kernel.mount()
    for mount in (ours, native):
        watched(mount)
        session(Files(mount, OTHER))
        profile = Files(mount, SHELL).read("/kprobe_profile")
        counts.append({line.split()[0]: int(line.split()[1]) for line in profile.splitlines()})
    native.close()
    own, other = counts
    assert own == other
    assert own["reads"] > 3


def test_nothing_is_called_while_nobody_can_see_it(ours: Mount) -> None:
    files = Files(ours, SHELL)
    # While trace is open, Linux cannot give the buffers their full size, which enabling an event does.
    files.write("/tracing/buffer_size_kb", "1408")
    files.write("/tracing/trace_marker", "mark")
    files.read("/tracing/trace")
    handles = [ours.open(SHELL, "/tracing/trace", os.O_RDONLY) for _ in range(3)]
    assert not calls_of(ours)._is_ready
    assert {part.fd for part in control(ours).files()} == {None}
    watched(ours)
    # The three files were open before.
    fds = {each.fd for each in control(ours).files() if each.handle in handles}
    assert None not in fds
    assert len(fds) == 3
    for handle in handles:
        ours.release(handle)
    files.write(f"{EVENTS}/enable", "0")
    files.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    files.read("/tracing/trace")
    assert not calls_of(ours).is_watched
    assert control(ours).files() == []
    assert open_files(ours) == []


def open_files(mount: Mount) -> list[int]:
    """Return the guest's descriptors that stand for open control files."""
    with mount.lock:
        guest_of(mount).control_closes.flush()
    init = guest_of(mount).tasks.init.pid
    entries = guest_of(mount).syscalls.listdir(f"/proc/{init}/fd")
    return sorted(fd for name, *_ in entries if name.isdigit() and (fd := int(name)) > 3)


def test_a_read_that_waits_sleeps_in_the_guest(ours: Mount) -> None:
    """A read that waits sleeps in the guest while other clients go on.

    The read ends with data or with its client's errno.
    """
    shell = watched(ours, "r:read ksys_read ret=$retval:s64\np:other do_exit\n")
    shell.write(f"{EVENTS}/read/filter", f"common_pid == {READER.pid}")
    shell.write("/tracing/trace", "", os.O_WRONLY | os.O_TRUNC)
    pipe = ours.open(READER, "/tracing/trace_pipe", os.O_RDONLY)
    for _ in range(2):
        with pytest.raises(WouldBlock):
            ours.read(READER, pipe, 4096, 0)
        Files(ours, OTHER).write("/tracing/tracing_on", "1")
    task = guest_of(ours).clients.known(READER.pid)
    assert task is not None
    assert task.waits
    ours.give_up(READER, pipe, errno.EINTR)
    assert not task.pending
    assert task.result == -errno.EINTR
    # The interrupted read has made a record, which can be read.
    found = ours.read(READER, pipe, 4096, 0)
    assert f"ret={-errno.EINTR}".encode() in found
    assert task.result == len(found)
    shell.write(f"{EVENTS}/read/filter", "common_pid == 1")
    assert b"ret=" in ours.read(READER, pipe, 4096, 0)
    with pytest.raises(WouldBlock):
        ours.read(READER, pipe, 4096, 0)
    shell.write("/tracing/trace_marker", "mark")
    found = ours.read(READER, pipe, 4096, 0)
    assert b"mark" in found
    assert task.result == len(found)


def test_one_that_is_killed_while_it_waits(ours: Mount) -> None:
    watched(ours, "p:opened do_sys_openat2\n")
    Files(ours, SHELL).write("/tracing/tracing_on", "0")
    Files(ours, SHELL).write("/tracing/trace", "", os.O_WRONLY | os.O_TRUNC)
    pipe = ours.open(READER, "/tracing/trace_pipe", os.O_RDONLY)
    with pytest.raises(WouldBlock):
        ours.read(READER, pipe, 4096, 0)
    task = guest_of(ours).clients.known(READER.pid)
    assert task is not None
    assert task.waits
    with ours.lock:
        guest_of(ours).clients.end(READER.pid)
    assert not task.alive
    ours.release(pipe)
    assert "opened" in Files(ours, OTHER).read("/kprobe_profile")
    assert open_files(ours) == []


def test_what_a_write_does_may_run_the_guest(ours: Mount) -> None:
    """The client's task sleeps in write(2) while the write calls functions or changes probes in the guest."""
    shell = watched(ours)
    assert shell.call("int_sqrt 81") == "int_sqrt = 0x9 (9)\n"
    for number in range(3):
        shell.write("/kprobe_events", f"p:more{number} vfs_read+5\n", os.O_WRONLY | os.O_APPEND)
        shell.write(f"{EVENTS}/more{number}/enable", "1")
        shell.read(f"{EVENTS}/more{number}/format")
        shell.write(f"{EVENTS}/more{number}/enable", "0")
        shell.write("/kprobe_events", f"-:more{number}\n", os.O_WRONLY | os.O_APPEND)
    # Change the text while no probe is armed.
    shell.write(f"{EVENTS}/enable", "0")
    shell.write("/kprobe_events", "p:last vfs_write\n", os.O_WRONLY | os.O_TRUNC)
    shell.write("/tracing/current_tracer", "function")
    shell.write("/tracing/current_tracer", "nop")
    assert shell.read("/kprobe_events") == "p:kprobes/last vfs_write\n"
    assert not guest_of(ours).tasks.machine.death


@pytest.mark.parametrize("is_tracefs", [False, True])
def test_names(is_tracefs: bool) -> None:
    """System calls on control files have the paths of the kernel's own tracefs, even for files of a new
    instance.
    """
    mount = ours_mount(is_tracefs=is_tracefs)
    top = "" if is_tracefs else "/tracing"
    files = Files(mount, SHELL)
    files.write(f"{top}/kprobe_events", "p:mine/opened do_sys_openat2 name=+0(%si):ustring\n")
    files.write(f"{top}/events/mine/opened/enable", "1")
    mount.mkdir(SHELL, f"{top}/instances/new", 0o755)
    files.read(f"{top}/instances/new/trace")
    mount.rmdir(SHELL, f"{top}/instances/new")
    found = re.findall(r'name="([^"]+)"', files.read(f"{top}/trace"))
    assert found == ["/tracing/instances/new/trace", "/tracing/trace"]
    if not is_tracefs:
        files.read("/machine/version")
        files.read("/kprobes/list")
        found = re.findall(r'name="([^"]+)"', files.read("/tracing/trace"))
        assert found[2:4] == ["/machine/version", "/kprobes/list"]
    mount.close()


def test_a_kernel_that_lacks_a_function_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = ours_mount()
    lookup: Callable[[str], int | None] = calls_of(mount).engine.kernel.kallsyms.lookup_name
    monkeypatch.setattr(
        calls_of(mount).engine.kernel.kallsyms, "lookup_name",
        lambda name: None if name == "stream_open" else lookup(name),
    )  # fmt: skip
    shell = watched(mount)
    counts = [line.split()[1] for line in shell.read("/kprobe_profile").splitlines()]
    assert counts == ["0"] * DEFINITIONS.count("\n")
    mount.close()


def test_limits(ours: Mount) -> None:
    """machine/limits of a distribution's kernel has entries for open files and tracing, but none for scratch/
    and runs.
    """
    shell = Files(ours, SHELL)

    def shown() -> dict[str, list[int]]:
        return {
            name: [*map(int, numbers)]
            for name, *numbers in map(str.split, shell.read("/machine/limits").splitlines())
        }

    def refusal(path: str, text: str) -> int | None:
        with pytest.raises(KernelError) as refused:
            shell.write(path, text)
        return refused.value.errno

    assert [*shown()] == [
        "probes", "instances", "open_files", "user_open_files",
        "hist_bytes", "user_hist_bytes", "definition_bytes", "user_definition_bytes",
        "user_record_bytes", "record_bytes",
    ]  # fmt: skip
    shell.write("/kprobe_events", "p:one vfs_read\n")
    shell.write("/machine/limits", "probes 2\ninstances 0\n")
    assert shown()["probes"] == [2, 1]
    shell.write("/tracing/kprobe_events", "p:two vfs_read\n")
    assert refusal("/tracing/kprobe_events", "p:three vfs_read\n") == errno.ENOSPC
    assert shown()["probes"] == [2, 2]
    for unknown in ("scratch_bytes 1\n", "run_budget_ms 100\n", "record_bytes 1\n", "nothing 1\n"):
        assert refusal("/machine/limits", unknown) == errno.EINVAL
    shell.write("/machine/limits", f"open_files {shown()['open_files'][1] - 1}\n")
    assert refusal("/kprobe_events", "p:four vfs_read\n") == errno.ENFILE
    shell.write("/machine/limits", "open_files max\nprobes 100\nhist_bytes 0\n")
    assert refusal("/tracing/events/kprobes/one/trigger", "hist:keys=common_pid") == errno.ENOMEM


@pytest.mark.parametrize("is_watched", [False, True])
def test_refused_writes_leave_no_garbage(ours: Mount, is_watched: bool) -> None:
    """The errors and the objects of refused writes are freed without a collection of reference cycles."""
    files = watched(ours) if is_watched else Files(ours, SHELL)
    for path in ("/kprobe_events", "/tracing/current_tracer", "/tracing/events/sched/sched_switch/filter"):
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                try:
                    files.write(path, "nonsense == 1")
                except KernelError:
                    continue
                pytest.fail(f"{path} takes nonsense")
            # A few objects may be those of a cache that is filled at the first use.
            assert gc.collect() < 20
        finally:
            gc.enable()
