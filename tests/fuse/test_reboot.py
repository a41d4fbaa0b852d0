"""A reboot by machine/power: the new kernel gets the old kernel's definitions and records, and open files
stay usable.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.trace.array.previous_boot import PreviousBootRecords
from emulated_kernel.trace.array.trace_array import REBOOT_MARK, TraceArray
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import HostReadingFile
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile
from emulated_kernel.vfs.mount import Mount
from kprobefs.common.errors import ExitStatus
from kprobefs.common.mountpoints import MountState, condition
from kprobefs.daemon.reboot import PLACE, RebootableKernel
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.saver import saved
from kprobefs.definitions.syntax import read_lines
from tests.fuse.harness import REAL_PROGRAM, daemon, eventually, kprobefs, needs_fuse
from tests.fuse.test_definitions import ALL, OUTSIDE
from tests.kprobes.test_many_at_one_place import calls_of
from tests.mounted.files import assert_errno

pytestmark = pytest.mark.usefixtures("objects_excluded")

CLIENT = Client(os.getpid(), 0, 0)
MARK = REBOOT_MARK.decode()


class User:
    """A process that uses a mount."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return self.mount.open(CLIENT, path, flags)

    def write(self, path: str, text: str) -> None:
        handle = self.open(path, os.O_WRONLY)
        try:
            self.mount.write(CLIENT, handle, text.encode(), 0)
        finally:
            self.mount.release(handle)

    def read(self, path: str) -> str:
        handle = self.open(path)
        data = self.rest(handle)
        self.mount.release(handle)
        return data.decode()

    def rest(self, handle: int, position: int = 0) -> bytes:
        data = b""
        while part := self.mount.read(CLIENT, handle, 1 << 16, position + len(data)):
            data += part
        return data

    def reboot(self) -> None:
        self.write("/machine/power", "reboot\n")

    def apply(self, living: RebootableKernel, text: str) -> None:
        with living.mount.lock:
            loader = Loader(living._all_files(living._kernel))
            failed = loader.apply(list(read_lines("f", text)))
        # Some lines are about x86's registers and jumps.
        assert len(failed) == (0 if living._kernel.config.arch == "x86_64" else 4)


@pytest.fixture(params=["x86_64", "riscv64"])
def living(request: pytest.FixtureRequest) -> Iterator[RebootableKernel]:
    found = RebootableKernel(MachineConfig(arch=request.param, cpus=2), RootLayout.FULL, Owner(0, 0))
    yield found
    found.mount.close()
    found._kernel.close()


def records(trace: str) -> list[str]:
    return [line for line in trace.splitlines() if line and not line.startswith("#")]


def test_what_is_defined_is_there_again(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.apply(living, ALL + OUTSIDE)
    before = user.read("/machine/definitions")
    assert "instances/slow/events/kprobes/reads/enable = 1" in before
    old = living._kernel
    user.reboot()
    assert living._kernel is not old
    assert user.read("/machine/definitions") == before
    assert user.read("/machine/power") == "running\nboots 2\n"


FILTERS = {
    "foo > 1": "none",
    "count >": "none",
    "count ==\n77777": "count == 77777",
    'comm ~ "a b*"\n|| count\n== 3': 'comm ~ "a b*" || count == 3',
}
"""Filter as written -> filter after the reboot. A newline becomes a blank; a refused filter becomes none."""


@pytest.mark.parametrize(
    ("living", "written"), [*zip(["x86_64", "riscv64"] * 2, FILTERS, strict=True)], indirect=["living"]
)
def test_filters_are_kept_or_were_none(living: RebootableKernel, written: str) -> None:
    user, kept = User(living.mount), FILTERS[written]
    user.write("/kprobe_events", "p:reads vfs_read count=$arg3\n")
    directory = "/tracing/events/kprobes/reads"
    with suppress(KernelError):
        user.write(f"{directory}/filter", f"{written}\n")
    # The new event has no `count`, so its filter file shows the filter of the group as refused.
    user.write("/kprobe_events", "p:writes vfs_write\n")
    user.write("/tracing/events/kprobes/filter", "count > 3\n")
    assert "parse_error" in user.read("/tracing/events/kprobes/writes/filter")
    with suppress(KernelError):
        user.write(f"{directory}/filter", f"{written}\n")
    if kept != "none":
        user.write(f"{directory}/trigger", f"traceoff:3 if {written}\n")
        user.write(f"{directory}/trigger", f"stacktrace if {written}\n")
    lines = user.read("/machine/definitions").splitlines()
    triggers = [f"traceoff:3 if {kept}", f"stacktrace if {kept}"] if kept != "none" else []
    assert [line for line in lines if line.startswith("events/")] == [
        *([f"events/kprobes/reads/filter = {kept}"] if triggers else []),
        *(f"events/kprobes/reads/trigger = {trigger}" for trigger in triggers),
    ]
    user.reboot()
    assert user.read(f"{directory}/filter") == f"{kept}\n"
    assert user.read("/tracing/events/kprobes/writes/filter") == "none\n"
    assert user.read("/machine/definitions").splitlines() == lines
    assert PLACE not in user.read("/machine/dmesg")


def test_a_string_with_a_newline_is_told_of(living: RebootableKernel) -> None:
    """A filter whose string has a newline is only a comment in machine/definitions.

    Otherwise, the text after the newline would be read as a definition. After a reboot, machine/power lists
    the filter as lost.
    """
    user = User(living.mount)
    user.write("/kprobe_events", "p:reads vfs_read\n")
    user.write("/tracing/events/kprobes/reads/filter", 'comm == "\np:evil vfs_write\n"')
    lines = user.read("/machine/definitions").splitlines()
    assert [line.partition(":")[0] for line in lines if "reads/filter" in line] == [
        "# events/kprobes/reads/filter"
    ]
    assert not [line for line in lines if line.startswith("p:evil")]
    user.reboot()
    assert user.read("/tracing/events/kprobes/reads/filter") == "none\n"
    assert PLACE not in user.read("/machine/dmesg")
    [lost] = user.read("/machine/power").splitlines()[2:]
    assert lost.startswith("lost events/kprobes/reads/filter: ")


def test_records_and_ids_are_kept(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/kprobe_events", "p:gone vfs_write\np:reads vfs_read count=$arg3\n")
    living.mount.mkdir(CLIENT, "/tracing/instances/slow", 0o755)
    user.write("/kprobe_events", "-:gone\n")
    for place in ("/tracing", "/tracing/instances/slow"):
        user.write(f"{place}/events/kprobes/reads/enable", "1")
    user.write("/tracing/trace_marker", "here\n")
    file = living.mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR)
    for count in range(1, 300):
        living.mount.read(CLIENT, file, count, 0)
    for place in ("/tracing", "/tracing/instances/slow"):
        user.write(f"{place}/tracing_on", "0")
    identity = user.read("/tracing/events/kprobes/reads/id")
    before = {place: user.read(f"{place}/trace") for place in ("/tracing", "/tracing/instances/slow")}
    assert len(records(before["/tracing"])) == 300
    user.reboot()
    for place, trace in before.items():
        *kept, mark = records(user.read(f"{place}/trace"))
        assert kept == records(trace)
        assert f"{mark}\n".endswith(f"tracing_mark_write: {MARK}")
        user.write(f"{place}/tracing_on", "1")
    assert user.read("/tracing/events/kprobes/reads/id") == identity
    user.write("/tracing/trace_marker", "there\n")
    stamps = [line.split(": ")[0].split()[-1] for line in records(user.read("/tracing/trace"))]
    assert stamps == sorted(stamps)
    assert any(line.endswith(": there") for line in records(user.read("/tracing/trace")))


def test_open_files_go_on_or_say_why_not(living: RebootableKernel) -> None:
    user, mount = User(living.mount), living.mount
    user.write("/kprobe_events", "p:reads vfs_read count=$arg3\n")
    definitions, version = user.open("/kprobe_events"), user.open("/machine/version")
    begun = mount.read(CLIENT, version, 5, 0)
    pipe = user.open("/tracing/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(WouldBlock):
        mount.read(CLIENT, pipe, 100, 0)
    told: list[bool] = []
    assert mount.poll(pipe, lambda: told.append(True)) == 0
    file = mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR)
    mount.mkdir(CLIENT, "/tracing/instances/slow", 0o755)
    enable = user.open("/tracing/instances/slow/events/kprobes/reads/enable", os.O_RDWR)
    user.reboot()
    assert told == [True]
    assert user.rest(definitions) == b"p:kprobes/reads vfs_read count=$arg3\n"
    assert begun + user.rest(version, len(begun)) == user.read("/machine/version").encode()
    with pytest.raises(KernelError) as caught:
        mount.read(CLIENT, file, 1, 0)
    assert caught.value.errno == errno.ESTALE
    mount.release(file)
    assert mount.write(CLIENT, enable, b"1", 0) == 1
    assert user.read("/tracing/instances/slow/events/kprobes/reads/enable") == "1\n"
    user.write("/tracing/trace_marker", "for the pipe\n")
    assert b"for the pipe" in mount.read(CLIENT, pipe, 1000, 0)
    # The probe is armed again: a read of a file of the new guest is a hit.
    file = mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR)
    mount.read(CLIENT, file, 77, 0)
    assert "count=0x4d" in user.read("/tracing/instances/slow/trace")


def test_a_panicked_kernel_comes_back(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/kprobe_events", "p:reads vfs_read\n")
    user.write("/tracing/events/kprobes/reads/enable", "1")
    power = user.open("/machine/power", os.O_WRONLY)
    with pytest.raises(KernelError):
        user.write("/machine/call", 'panic "x"')
    assert living.mount.is_dead()
    assert user.read("/machine/power") == "panicked\nboots 1\n"
    assert living.mount.write(CLIENT, power, b"reboot\n", 0) == 7
    assert not living.mount.is_dead()
    file = living.mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR)
    assert living.mount.write(CLIENT, file, b"alive", 0) == 5
    living.mount.read(CLIENT, file, 5, 0)
    assert "reads: (vfs_read" in user.read("/tracing/trace")


def test_what_cannot_be_booted_changes_nothing(tmp_path: Path) -> None:
    image = tmp_path / "image"
    living = RebootableKernel(MachineConfig(), RootLayout.FULL, Owner(0, 0))
    user = User(living.mount)
    kernel = living._kernel
    kernel.config = MachineConfig(image=image)
    for text, number in (("reboot\n", errno.ENOENT), ("halt\n", errno.EINVAL)):
        with pytest.raises(OSError, match=rf"Errno {number}\b"):
            user.write("/machine/power", text)
    assert user.read("/machine/dmesg").endswith(" power: 'halt' isn't reboot\n")
    assert living._kernel is kernel
    assert user.read("/machine/power") == "running\nboots 1\n"
    kernel.close()


@needs_fuse
@pytest.mark.mounted
def test_the_command(directory: Path) -> None:
    with daemon(directory, program=REAL_PROGRAM) as running:
        Path(running.path("kprobe_events")).write_text("p:reads vfs_read\n")
        with pytest.raises(OSError, match="Input/output"):
            Path(running.path("machine/call")).write_text('panic "x"')
        # Under load, the daemon may answer later than condition() waits.
        eventually(lambda: condition(str(directory)) is MountState.PANICKED)
        for _ in range(2):
            result = kprobefs("reboot", str(directory), program=REAL_PROGRAM)
            assert (result.stderr, result.returncode) == ("", 0)
            eventually(lambda: condition(str(directory)) is MountState.SERVING)
        assert Path(running.path("kprobe_events")).read_text() == "p:kprobes/reads vfs_read\n"
        Path(running.path("machine/limits")).write_text("probes 0\n")
        result = kprobefs("reboot", str(directory), program=REAL_PROGRAM)
        assert result.returncode == ExitStatus.FAILURE
        assert "p:kprobes/reads vfs_read" in result.stderr
    assert kprobefs("reboot", str(directory), program=REAL_PROGRAM).returncode == ExitStatus.NOT_MOUNTED


@pytest.mark.parametrize("refused", ["allocate", "image", "files"])
def test_a_reboot_that_fails_changes_nothing(
    living: RebootableKernel, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    user, mount = User(living.mount), living.mount
    living.mount.mkdir(CLIENT, "/tracing/instances/slow", 0o755)
    user.write("/kprobe_events", "p:reads vfs_read\n")
    user.write("/tracing/events/kprobes/reads/enable", "1")
    file = mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR)
    old, room, asked = living._kernel, TraceArray.memory_for, []

    def fail(*_args: object, **_named: object) -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "gone")

    def no_second(mine: TraceArray, theirs: PreviousBootRecords) -> object:
        asked.append(theirs)
        if len(asked) == 2:
            raise MemoryError
        return room(mine, theirs)

    with monkeypatch.context() as patch:
        if refused == "allocate":
            patch.setattr(TraceArray, "memory_for", no_second)
        elif refused == "image":
            patch.setattr("kprobefs.daemon.reboot.Kernel", fail)
        else:
            patch.setattr(RebootableKernel, "_files", fail)
        with pytest.raises(MemoryError if refused == "allocate" else KernelError):
            user.reboot()
    assert living._kernel is old
    assert user.read("/machine/power") == "running\nboots 1\n"
    before = user.read("/tracing/trace").count(": reads: (")
    mount.read(CLIENT, file, 4, 0)
    assert user.read("/tracing/trace").count(": reads: (") > before


def test_what_was_prepared_for_another_kernel_isnt_done(
    living: RebootableKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, mount = User(living.mount), living.mount
    handle = user.open("/machine/modules", os.O_WRONLY)
    opened_as = HostReadingFile.opened_as
    prepare = opened_as.prepare

    def slow(opened: Any, client: Client, data: bytes) -> object:
        prepared = prepare(opened, client, data)
        user.reboot()
        return prepared

    with monkeypatch.context() as patch:
        patch.setattr(opened_as, "prepare", slow)
        with assert_errno(errno.ESTALE):
            mount.write(CLIENT, handle, b"unload nothing\n", 0)
    with assert_errno(errno.ENOENT):
        mount.write(CLIENT, handle, b"unload nothing\n", 0)


def test_one_write_boots_once_or_not_at_all(living: RebootableKernel) -> None:
    user = User(living.mount)
    with assert_errno(errno.EINVAL):
        user.write("/machine/power", "reboot\nnonsense\n")
    user.write("/machine/power", "reboot\nreboot\n")
    assert user.read("/machine/power") == "running\nboots 2\n"


def test_counts_switches_modules_and_loads_go_on(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/machine/modules", "load counter_user\n")
    user.write("/kprobe_events", "p:reads vfs_read\np:writes vfs_write\n")
    user.write("/tracing/events/kprobes/enable", "1")
    user.write("/kprobes/stats/kprobes/writes/enabled", "0")
    file = living.mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR)
    for _ in range(20):
        living.mount.read(CLIENT, file, 1, 0)
    user.write("/machine/load", "timers rate=10 duration=600\n")
    user.write("/tracing/events/kprobes/reads/enable", "0")
    before, modules = user.read("/kprobe_profile"), user.read("/machine/modules")
    assert modules
    user.reboot()
    assert user.read("/kprobe_profile") == before
    assert user.read("/kprobes/stats/kprobes/writes/enabled") == "0\n"
    assert user.read("/tracing/events/kprobes/writes/enable") == "1\n"
    assert user.read("/machine/modules") == modules
    (load,) = user.read("/machine/load").splitlines()
    assert load.startswith("timers rate=10 ")
    assert " state=running " in load
    user.write("/machine/load", "stop\n")


@pytest.mark.parametrize("living", ["x86_64"], indirect=True)
def test_what_is_known_of_probes_is_what_their_files_say(living: RebootableKernel) -> None:
    user = User(living.mount)
    lines = ["p:b/one lcm", "p:a/two gcd+5", "r:a/three gcd", "p:a/four gcd+5", "p:later no:where"]
    user.write("/tracing/kprobe_events", "\n".join([*lines, "p:a/five int_sqrt+5", "p:a/five gcd+5"]))
    for event in ("b/one", "a/two", "a/three", "a/five"):
        user.write(f"/tracing/events/{event}/enable", "1")
    user.write("/tracing/events/b/one/enable", "0")
    user.write("/tracing/events/b/one/trigger", "traceoff:1")
    user.write("/kprobes/stats/a/five/optimized", "0")
    user.write("/kprobes/stats/a/three/enabled", "0")
    user.write("/kprobes/stats/a/four/enabled", "1")
    living._kernel.call("lcm", 4, 6)
    told = {state.pop("event"): state for state in map(json.loads, user.read("/machine/probes").splitlines())}
    assert told.keys() == {"b/one", "a/two", "a/three", "a/four", "a/five", "kprobes/later"}
    assert len(told) == user.read("/machine/probes").count("\n")
    for event, state in told.items():
        read = {name: user.read(f"/kprobes/stats/{event}/{name}").strip() for name in state}
        assert {name: str(value * 1) for name, value in state.items()} == read
    with living.mount.lock:
        kernel = living._kernel
        default = kernel.kretprobes.default_maxactive
        by_files = [f"{line}\n" for line in saved(living._all_files(kernel), lambda: default)]
    assert by_files == user.read("/machine/definitions").splitlines(keepends=True)
    switched = [line for line in by_files if line.startswith("kprobes/stats")]
    assert switched == [
        "kprobes/stats/a/five/optimized = 0\n",
        "kprobes/stats/a/four/enabled = 1\n",
        "kprobes/stats/a/four/optimized = 0\n",
        "kprobes/stats/a/three/enabled = 0\n",
        "kprobes/stats/a/two/optimized = 0\n",
    ]


@pytest.mark.parametrize("living", ["x86_64"], indirect=True)
def test_a_stopped_change_of_text_ends_with_the_kernel(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/kprobes/stages", "1")
    user.write("/kprobe_events", "p:inside gcd+5\n")
    user.write("/tracing/events/kprobes/inside/enable", "1")
    user.write("/kprobes/stats/kprobes/inside/optimized", "1")
    assert "breakpoint written" in user.read("/kprobes/stages")
    user.reboot()
    assert user.read("/kprobes/stages") == "0\n"
    with living.mount.lock:
        living._kernel.kprobes.optimizer.flush()
    assert user.read("/kprobes/stats/kprobes/inside/optimized") == "1\n"
    living.mount.close()


def test_what_was_disarmed_is_armed_again_behind_a_reboot(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/kprobes/return_hook", "instances\n")
    behind = 5 if living._kernel.config.arch == "x86_64" else 8
    user.write("/kprobe_events", f"p:reads vfs_read\np:inside vfs_read+{behind}\nr:ret vfs_read\n")
    user.write("/tracing/events/kprobes/reads/enable", "1")
    user.write("/tracing/events/kprobes/inside/trigger", "hist:keys=common_pid")
    user.write("/tracing/events/kprobes/ret/enable", "1")
    user.write("/kprobes/enabled", "0")
    before = user.read("/machine/definitions")
    user.reboot()
    assert user.read("/machine/definitions") == before
    assert before.endswith("kprobes/enabled = 0\n")
    user.write("/kprobes/enabled", "1")
    assert "[DISABLED]" not in user.read("/kprobes/list")
    assert "[instances]" in user.read("/kprobes/return_hook")
    file = living.mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR)
    living.mount.read(CLIENT, file, 1, 0)
    counts = {line.split()[0]: int(line.split()[1]) for line in user.read("/kprobe_profile").splitlines()}
    assert all(counts[event] for event in ("reads", "inside", "ret")), counts


HIDES = ("/tracing/events/enable", "/kprobes/enabled", "/kprobes/optimization")


@pytest.mark.parametrize("profile", ["linux-6.1", "djprobe-2007"])
@pytest.mark.parametrize("hidden_by", ["", *HIDES])
def test_a_jump_that_was_asked_for_or_kept_out_still_is(profile: str, hidden_by: str) -> None:
    """If a user has requested or refused the jump of a probe, the request survives a reboot.

    A switch that disarms probes or forbids all jumps may hide the request meanwhile.
    """
    config = MachineConfig(profile=profile)
    living = RebootableKernel(config, RootLayout.FULL, Owner(0, 0))
    user, asked = User(living.mount), "0" if profile == "linux-6.1" else "1"
    user.write("/kprobe_events", "p:wanted ksys_read+0x5\np:other ksys_write+0x5\n")
    user.write("/tracing/events/kprobes/enable", "1")
    stats = "/kprobes/stats/kprobes"
    user.write(f"{stats}/wanted/optimized", asked)
    if hidden_by:
        user.write(hidden_by, "0")
    user.reboot()
    assert (user.read(f"{stats}/wanted/asked"), user.read(f"{stats}/other/asked")) == (f"{asked}\n", "")
    if hidden_by:
        user.write(hidden_by, "1")
    with living.mount.lock:
        living._kernel.kprobes.optimizer.flush()
    other = str(1 - int(asked))
    assert user.read(f"{stats}/wanted/optimized") == f"{asked}\n"
    assert user.read(f"{stats}/other/optimized") == f"{other}\n"
    living.mount.close()


@pytest.mark.parametrize("line", ["p:mine/k{} vfs_read+0x5", "r:mine/k{} vfs_read $retval"])
def test_each_definition_is_work_for_one(line: str) -> None:
    """The work of a reboot grows only linearly with the number of definitions."""
    living = RebootableKernel(MachineConfig(), RootLayout.FULL, Owner(0, 0))
    user, calls, defined = User(living.mount), [], 0
    for number in (50, 100, 200):
        lines = [f"{line.format(each)}\n" for each in range(defined, number)]
        user.write("/tracing/kprobe_events", "".join(lines))
        defined = number
        calls.append(calls_of(lambda _: user.reboot(), [living]))
        assert user.read("/tracing/kprobe_events").count("\n") == number
    living.mount.close()
    living._kernel.close()
    assert calls[2] - calls[1] < 1.25 * 2 * (calls[1] - calls[0])
    # The nodes of a return probe are made one by one. A reboot does not read all files of an event.
    assert calls[2] - calls[1] < 100 * (850 if line.startswith("r") else 650), calls


@pytest.mark.parametrize("living", ["x86_64"], indirect=True)
def test_the_old_kernel_answers_while_the_new_one_is_built(
    living: RebootableKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(living.mount)
    user.write("/kprobe_events", "p:early int_sqrt\n")
    for number in range(20):
        user.write("/tracing/events/kprobes/early/trigger", f"hist:name=n{number}:keys=common_pid\n")
    changes = [
        partial(user.write, "/kprobe_events", "p:late vfs_read\n"),
        partial(living.mount.mkdir, CLIENT, "/tracing/instances/later", 0o755),
        partial(user.write, "/tracing/trace_clock", "mono\n"),
    ]
    threads = [threading.Thread(target=change) for change in changes]
    definitions: list[str] = []

    def answer(_lock: ControlLock) -> None:
        if not definitions:
            for thread in threads:
                thread.start()
        assert user.read("/machine/power") == "running\nboots 1\n"
        user.write("/tracing/trace_marker", "meanwhile\n")
        definitions.append(user.read("/kprobe_events"))

    with monkeypatch.context() as patch:
        patch.setattr(ControlLock, "yield_lock", answer)
        user.reboot()
    for thread in threads:
        thread.join(30)
    assert len(definitions) > 4
    assert set(definitions) == {"p:kprobes/early int_sqrt\n"}
    assert user.read("/machine/power") == "running\nboots 2\n"
    assert user.read("/kprobe_events") == "p:kprobes/early int_sqrt\np:kprobes/late vfs_read\n"
    assert "later" in [entry.name for entry in living.mount.readdir("/tracing/instances")]
    assert "[mono]" in user.read("/tracing/trace_clock")
    assert len(user.read("/tracing/events/kprobes/early/trigger").splitlines()) == 20


@pytest.mark.parametrize("living", ["x86_64"], indirect=True)
def test_a_reboot_whose_writer_is_killed_changes_nothing(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/kprobe_events", "p:early int_sqrt\n")
    old = living._kernel
    asked = iter(range(1000))
    living.mount.lock.is_dying = lambda _thread: next(asked) == 2
    with assert_errno(errno.EINTR):
        user.reboot()
    assert living._kernel is old
    assert gc.isenabled()
    assert user.read("/machine/power") == "running\nboots 1\n"
    user.write("/kprobe_events", "p:late int_sqrt\n")
    user.reboot()
    assert user.read("/kprobe_events") == "p:kprobes/early int_sqrt\np:kprobes/late int_sqrt\n"


@pytest.mark.parametrize("living", ["x86_64"], indirect=True)
def test_a_reboot_reads_no_files_of_events_that_have_no_settings(
    living: RebootableKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(living.mount)
    user.write("/kprobe_events", "".join(f"p:e{number} int_sqrt a=$arg1\n" for number in range(50)))
    user.write("/tracing/events/kprobes/e7/filter", "a > 3\n")
    user.write("/tracing/events/kprobes/e8/trigger", "traceoff\n")
    user.write("/tracing/events/kprobes/e9/trigger", "enable_event:kprobes:e10\n")
    opened: list[str] = []
    tree_open = NodeTree.open

    def counted(self: NodeTree, path: str, flags: int, client: Client) -> OpenFile:
        opened.append(path)
        return tree_open(self, path, flags, client)

    before = user.read("/machine/definitions")
    with monkeypatch.context() as patch:
        patch.setattr(NodeTree, "open", counted)
        user.reboot()
    assert user.read("/machine/definitions") == before
    found = {path.split("/")[-2] for path in opened if "/events/" in path}
    assert found == {"e7", "e8", "e9", "e10"}


@pytest.mark.parametrize("living", ["x86_64"], indirect=True)
def test_a_definition_that_fails_after_a_reboot_is_logged_and_others_follow(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/tracing/kprobe_events", "p:one lcm\np:one gcd+5\np:two lcm\n")
    user.write("/tracing/events/kprobes/one/filter", "__probe_ip > 5")
    user.write("/machine/limits", "probes 2\n")
    user.reboot()
    assert user.read("/tracing/kprobe_events") == "p:kprobes/one lcm\np:kprobes/one gcd+5\n"
    assert user.read("/tracing/events/kprobes/one/filter") == "__probe_ip > 5\n"
    log = user.read("/machine/dmesg")
    assert f"{PLACE}:3: No space left on device\n" in log
    assert "    p:kprobes/two lcm\n" in log
    lost = [f"lost {PLACE}:3: No space left on device", "lost     p:kprobes/two lcm"]
    assert user.read("/machine/power").splitlines() == ["running", "boots 2", *lost]
    user.reboot()
    assert user.read("/machine/power") == "running\nboots 3\n"


def test_histograms_are_kept_whatever_their_sort_key(living: RebootableKernel) -> None:
    user = User(living.mount)
    user.write("/kprobe_events", "p:reads vfs_read count=$arg3\n")
    file = "/tracing/events/kprobes/reads/trigger"
    user.write(file, "hist:keys=count.log2:sort=count\n")
    user.write(file, "hist:keys=common_pid.execname:vals=count.hex:sort=common_pid,count.descending:pause\n")
    shown = user.read(file)
    user.reboot()
    assert user.read(file) == shown
    assert user.read("/machine/power") == "running\nboots 2\n"
