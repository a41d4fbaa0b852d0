"""Calls that no probe can notice, which the guest does not make: hits and records are as if the guest made
all calls.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, ItemsView, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from emulated_kernel.guests.builtin import watched_calls
from emulated_kernel.guests.builtin.watched_calls import WatchedCalls
from emulated_kernel.image import call_graph
from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.image.call_graph import Calls, FunctionCalls
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.text.text import WORD_SIZE
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch
from tests.sample import share

CLIENT = Client(FIRST_PID, 0, 0)
OTHER = Client(FIRST_PID + 1, 1000, 1000)
TIME = re.compile(r" +\d+\.\d{6}: ")
PROBED = ("vfs_read", "hostfs_read", "__fdget_pos", "vfs_write", "vfs_open", "filp_close", "kmem_cache_alloc")


# The call graph


@pytest.mark.parametrize("arch", call_graph.ARCHITECTURES)
def test_the_file_is_that_of_the_image(arch: str) -> None:
    image = load_image(arch=arch)
    assert image.path.with_name(call_graph.FILE_NAME).read_text() == call_graph.file_text(image)


@pytest.mark.parametrize("arch", call_graph.ARCHITECTURES)
def test_calls_execute_only_what_the_graph_says(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel, kernel.lock:
        seen: set[int] = set()
        engine = kernel.machine.hooks.engine
        engine.add_hook(HOOK_CODE, CODE_CALLBACK(lambda _engine, address, _size, _data: seen.add(address)))
        engine.flush_code()
        functions = FunctionCalls(kernel.image)
        calls = kernel.guest.syscalls
        processes = kernel.guest.processes
        task = processes.init
        text = [(start, end) for start, end in ((r.start, r.stop) for r in ranges_of(kernel))]

        def made(kind: int, call: Callable[[], object]) -> None:
            seen.clear()
            with suppress(KernelError):
                call()
            own = {address for address in seen if any(start <= address < end for start, end in text)}
            assert own, "no text was executed"
            unknown = {address for address in own if not functions.of(address) & kind}
            assert {str(kernel.sprint_symbol(address)) for address in unknown} == set()

        at = 0xFFFFFF9C
        for path, mode in (("/scratch/file", 0o644), ("/kprobes/none", 0o600)):
            made(Calls.NAMES, lambda p=path, m=mode: calls.open(task, p, os.O_RDWR | os.O_CREAT, m))
        fd = calls.open(task, "/scratch/file", os.O_RDWR)
        made(Calls.WRITES, lambda: calls.write(task, fd, bytes(20_000)))
        made(Calls.WRITES, lambda: calls.write(task, fd, b"x", 30_000))
        made(Calls.READS, lambda: calls.read(task, fd, 20_000, 0))
        made(Calls.READS, lambda: calls.read(task, fd, 20_000))
        made(Calls.READS, lambda: calls.read(task, 999, 1))
        for name, args in (("mkdir", (0o755,)), ("chmod", (0o700,)), ("lchown", (1, 1)), ("rmdir", ())):
            made(Calls.NAMES, lambda n=name, a=args: calls.with_path(task, n, "/scratch/directory", *a))
        for name in ("link", "rename", "symlink"):
            made(Calls.NAMES, lambda n=name: calls.with_paths(task, n, "/scratch/file", f"/scratch/{n}"))
        made(Calls.NAMES, lambda: calls.with_path(task, "newlstat", "/scratch/rename", 0))
        made(Calls.NAMES, lambda: calls.fstat(task, fd))
        made(Calls.NAMES, lambda: calls.seek(task, fd, 7))
        made(Calls.NAMES, lambda: calls.ftruncate(task, fd, 3))
        made(Calls.NAMES, lambda: calls.truncate(task, "/scratch/rename", 9))
        made(Calls.NAMES, lambda: calls.utimens(task, "/scratch/rename", 5, None))
        made(Calls.NAMES, lambda: calls.call(task, "close", fd))
        made(Calls.NAMES, lambda: calls.call(task, "faccessat", at, 0, 4))
        made(Calls.NAMES, lambda: processes.task_of(FIRST_PID, 0, 0))
        made(Calls.NAMES, lambda: processes.exit(FIRST_PID))
        made(Calls.NAMES, lambda: calls.with_path(task, "unlink", "/scratch/rename"))


def ranges_of(kernel: Kernel) -> list[range]:
    return [range(start, end) for start, end in kernel.image.text_ranges]


# Requests


class Machine:
    """A kernel with a mount, and the fixed requests of two clients."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.mount: Mount = kernel.mount()
        self.found: list[object] = []

    def write(self, path: str, text: str, flags: int = os.O_APPEND, client: Client = CLIENT) -> None:
        handle = self.mount.open(client, path, os.O_WRONLY | flags)
        self.mount.write(client, handle, text.encode(), 0)
        self.mount.release(handle)

    def read(self, path: str, client: Client = CLIENT) -> None:
        handle = self.mount.open(client, path, os.O_RDONLY)
        offset = 0
        while data := self.mount.read(client, handle, 4096, offset):
            offset += len(data)
        self.mount.release(handle)

    def waits(self, handle: int) -> bool:
        """Return True if a read of the open file `handle` would block."""
        try:
            self.mount.read(CLIENT, handle, 65536, 0)
        except WouldBlock:
            return True
        return False

    def use(self) -> None:
        """Let two clients read and write control files and files of scratch/, and let a client wait."""
        mount = self.mount
        for client in (CLIENT, OTHER, CLIENT):
            self.read("/kprobes/list", client)
            mount.getattr("/kprobes", lambda c=client: c)  # type: ignore[misc]
            mount.release(mount.opendir(client, "/tracing"))
        self.write("/tracing/trace_marker", "mark")
        self.write("/tracing/buffer_size_kb", "64", 0)
        handle = mount.create(CLIENT, "/scratch/file", 0o644, os.O_RDWR)
        mount.write(CLIENT, handle, b"data", 0)
        self.found.append(mount.read(CLIENT, handle, 100, 0))
        # Otherwise a hit during the read would make a record to read.
        self.write("/tracing/tracing_on", "0", 0)
        waiting = mount.open(CLIENT, "/tracing/trace_pipe", os.O_RDONLY)
        self.found.append([self.waits(waiting) for _ in range(4)])
        self.read("/kprobes/list")
        self.write("/kprobes/enabled", "1", 0, client=OTHER)
        self.found.append([self.waits(waiting) for _ in range(2)])
        mount.give_up(CLIENT, waiting, errno.EINTR)
        self.found.append(self.waits(waiting))
        self.write("/tracing/tracing_on", "1", 0)
        mount.release(waiting)
        mount.release(handle)
        mount.unlink(CLIENT, "/scratch/file")

    def records(self) -> list[str]:
        """Return the trace without times."""
        handle = self.mount.open(CLIENT, "/tracing/trace", os.O_RDONLY)
        data = b""
        while more := self.mount.read(CLIENT, handle, 65536, len(data)):
            data += more
        self.mount.release(handle)
        return [TIME.sub(": ", line) for line in data.decode().splitlines() if not line.startswith("#")]


def outcome(actions: Callable[[Machine], None]) -> tuple[list[object], list[str], dict[str, str]]:
    """Run `actions` on a new Machine.

    Return the results of its reads, the records without times, and the hits of all events.
    """
    watch = ScriptedWatch(comms={FIRST_PID: "client", FIRST_PID + 1: "other"})
    with Kernel(MachineConfig(), watch) as kernel:
        machine = Machine(kernel)
        actions(machine)
        hits = {}
        for line in kernel.read_file("tracing/kprobe_profile").splitlines():
            name, *counts = line.split()
            hits[name] = " ".join(counts)
        records = machine.records()
        machine.mount.close()
    return machine.found, records, hits


def half_of_pairs(rows: Sequence[str], columns: Sequence[str]) -> list[tuple[str, str]]:
    """Return every second pair, so that each row and each column occurs; with KPROBEFS_WHOLE=1, all pairs."""
    return [(row, column) for number, row in enumerate(rows) for column in share(columns, number, 2)]


def same(actions: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Check that `actions` have the same outcome if the guest makes all calls.

    Return the hits of all events.
    """
    found = outcome(actions)
    monkeypatch.setattr(FunctionCalls, "of", lambda _self, _address: Calls.ALL)
    assert outcome(actions) == found
    return found[2]


@pytest.mark.parametrize(("function", "argument"), half_of_pairs(PROBED, ("", " $arg3")))
def test_hits_are_those_of_a_guest_that_makes_all_calls(
    function: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def actions(machine: Machine) -> None:
        machine.write("/kprobe_events", f"p:seen {function}{argument}\n")
        machine.write("/tracing/events/kprobes/seen/enable", "1")
        machine.use()
        machine.write("/tracing/events/kprobes/seen/enable", "0")

    assert same(actions, monkeypatch)["seen"].split()[0] != "0"


@pytest.mark.parametrize(
    ("first", "second"),
    half_of_pairs(
        ("vfs_read", "vfs_read $arg1", "vfs_write"), ("vfs_open", "filp_close", "vfs_read+5", "vfs_write")
    ),
)
def test_files_stay_open_when_more_calls_are_watched(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a second probe is enabled while files are open, the results and hits are those of a guest that makes
    all calls.
    """

    def actions(machine: Machine) -> None:
        mount = machine.mount
        before = mount.open(CLIENT, "/kprobes/list", os.O_RDONLY)
        machine.write("/kprobe_events", f"p:first {first}\np:second {second}\n")
        machine.write("/tracing/events/kprobes/first/enable", "1")
        handles = [
            mount.open(client, path, flags)
            for client in (CLIENT, OTHER)
            for path, flags in (("/kprobes/list", os.O_RDONLY), ("/tracing/buffer_size_kb", os.O_RDWR))
        ]
        for handle in [before, *handles]:
            machine.found.append(mount.read(CLIENT, handle, 20, 0))
        machine.write("/tracing/events/kprobes/second/enable", "1")
        for handle in [before, *handles]:
            machine.found.append(mount.read(CLIENT, handle, 4096, 20))
        mount.write(OTHER, handles[-1], b"64", 0)
        for handle in [before, *handles]:
            mount.release(handle)
        machine.use()
        machine.write("/tracing/events/kprobes/second/enable", "0")
        machine.use()
        machine.write("/tracing/events/kprobes/first/enable", "0")

    hits = same(actions, monkeypatch)
    assert "0" not in (hits["first"].split()[0], hits["second"].split()[0])


def opens(kernel: Kernel) -> bool:
    """Return True if the guest executes an open(2) for a client's open of a control file."""
    mount = kernel.mount()
    before = kernel.machine.clock.now_ns()
    mount.release(mount.open(CLIENT, "/kprobes/list", os.O_RDONLY))
    mount.close()
    return kernel.machine.clock.now_ns() > before


class CountedWords(dict[int, int]):
    """A dict of words. The attribute `read` counts the words that items() has returned."""

    read = 0

    def items(self) -> ItemsView[int, int]:
        self.read += len(self)
        return super().items()


def test_a_poke_reads_no_words_if_too_many_are_patched() -> None:
    with Kernel() as kernel:
        text = kernel.machine.text
        start = next(start for start, _end in kernel.image.text_ranges)
        words = text.ledger.words = CountedWords()
        WatchedCalls(text, kernel.image)
        text.poke_batch((start + WORD_SIZE * number, b"\xcc") for number in range(200))
        few = words.read
        assert few > 0
        text.poke_batch((start + WORD_SIZE * number, b"\xcc") for number in range(200, 300))
        assert len(words) > 200
        assert words.read == few


def test_all_functions_in_a_patched_word_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with Kernel() as kernel:
        text = kernel.machine.text
        start = next(start for start, _end in kernel.image.text_ranges)
        kinds = {start: 1, start + 3: 2, start + 9: 4}
        monkeypatch.setattr(FunctionCalls, "of", lambda _self, address: kinds.get(address, 0))
        watched = WatchedCalls(text, kernel.image)
        text.poke_batch((address, b"\xcc") for address in kinds)
        assert len(text.ledger.words) == 1
        assert [watched.include(kind) for kind in (1, 2, 4, 8)] == [True, True, True, False]


def test_all_calls_are_watched_with_a_module() -> None:
    """While a module is loaded, the guest makes all calls, because any code of the kernel may call the
    module.
    """
    with Kernel(MachineConfig(), ScriptedWatch(comms={FIRST_PID: "client"})) as kernel:
        machine = Machine(kernel)
        machine.write("/kprobe_events", "p:seen vfs_read\n")
        machine.write("/tracing/events/kprobes/seen/enable", "1")
        opens(kernel)
        assert not opens(kernel)
        kernel.load_module("counter")
        assert opens(kernel)
        kernel.unload_module("counter")
        assert not opens(kernel)
        machine.mount.close()


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"checksum": 1, "masks": ""}', "\0"])
def test_without_the_file_of_the_image_all_calls_are_watched(text: str | None, tmp_path: Path) -> None:
    image = load_image()
    copy = tmp_path / "vmlinux"
    copy.write_bytes(image.path.read_bytes())
    if text is not None:
        copy.with_name(call_graph.FILE_NAME).write_text(text)
    functions = FunctionCalls(load_image(copy))
    assert functions.of(image.kallsyms.by_name("vfs_read")[0].address) == Calls.ALL
    assert FunctionCalls(image).of(image.kallsyms.by_name("vfs_read")[0].address) == Calls.READS


# Patches that make more calls noticed


def enable(kernel: Kernel, event: str, symbol: str) -> None:
    kernel.write_file("tracing/kprobe_events", f"p:{event} {symbol}\n")
    kernel.write_file(f"tracing/events/kprobes/{event}/enable", "1")


def hits_of_reads(kernel: Kernel, mount: Mount, handle: int, event: str = "seen") -> int:
    """Return the number of hits of a kprobe event by three reads of an open file."""

    def hits() -> int:
        lines = [line.split() for line in kernel.read_file("tracing/kprobe_profile").splitlines()]
        return next(int(line[1]) for line in lines if line[0] == event)

    before = hits()
    for _ in range(3):
        mount.read(CLIENT, handle, 20, 0)
    return hits() - before


@pytest.fixture
def watching() -> Iterator[tuple[Kernel, Mount]]:
    watch = ScriptedWatch(comms={FIRST_PID: "client", FIRST_PID + 1: "other"})
    with Kernel(MachineConfig(), watch) as kernel:
        yield kernel, kernel.mount()


def test_a_function_is_not_its_neighbour_in_a_word(watching: tuple[Kernel, Mount]) -> None:
    """A probe of dump_stack, which no client's call executes, does not change the hits of reads.

    The last bytes of another function, which all calls execute, are in the 8-byte word in which dump_stack
    begins.
    """
    kernel, mount = watching
    [probed] = kernel.image.kallsyms.by_name("dump_stack")
    functions = FunctionCalls(kernel.image)
    assert (functions.of(probed.address), functions.of(probed.address & -8)) == (0, Calls.ALL)
    enable(kernel, "seen", "vfs_read")
    handle = mount.open(CLIENT, "/kprobes/list", os.O_RDONLY)
    enable(kernel, "further", "dump_stack")
    assert hits_of_reads(kernel, mount, handle) == 3


def test_files_stay_open_when_many_places_are_patched(watching: tuple[Kernel, Mount]) -> None:
    kernel, mount = watching
    enable(kernel, "seen", "vfs_read")
    handle = mount.open(CLIENT, "/kprobes/list", os.O_RDONLY)
    functions = FunctionCalls(kernel.image)
    words = kernel.machine.text.ledger.words
    checker = kernel.kprobes.probe_checker
    places = (
        place
        for symbol in kernel.image.kallsyms.symbols
        if symbol.is_text and symbol.size and not functions.of(symbol.address)
        for place in sorted(checker.boundaries(symbol))
    )
    while len(words) <= watched_calls._MAX_WORDS:
        with suppress(KernelError):
            kernel.register_kprobe(Kprobe(addr=next(places), post_handler=lambda _kprobe, _regs: None))
    assert hits_of_reads(kernel, mount, handle) == 3


def test_files_are_opened_between_the_steps_of_a_write(
    watching: tuple[Kernel, Mount], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a client opens while another client's write enables many events is opened in the guest, so
    reads hit.
    """
    kernel, mount = watching
    enable(kernel, "writes", "vfs_write")
    events = ["p:many/seen vfs_read", "p:many/opens vfs_open", *(f"p:many/e{n} crc16" for n in range(200))]
    handle = mount.open(OTHER._replace(uid=0), "/tracing/kprobe_events", os.O_WRONLY | os.O_APPEND)
    for line in events:
        mount.write(OTHER._replace(uid=0), handle, f"{line}\n".encode(), 0)
    handles: list[int] = []
    lock = type(kernel.lock)
    yield_lock = lock.yield_lock

    def yields(self: ControlLock) -> None:
        yield_lock(self)
        if not handles:
            handles.append(mount.open(CLIENT, "/kprobes/list", os.O_RDONLY))

    monkeypatch.setattr(lock, "yield_lock", yields)
    handle = mount.open(OTHER._replace(uid=0), "/tracing/events/many/enable", os.O_WRONLY)
    mount.write(OTHER._replace(uid=0), handle, b"1", 0)
    assert kernel.guest.watched.execute_patches(Calls.NAMES)
    assert hits_of_reads(kernel, mount, handles[0]) == 3


def test_a_question_during_a_change_is_asked_again(
    watching: tuple[Kernel, Mount], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If execute_patches() is called between the notice of a patch and the patch itself, its answer is not
    cached.

    Such calls can happen, because requests call execute_patches() without the control lock.
    """
    kernel, _ = watching
    watched = kernel.guest.watched
    enable(kernel, "first", "crc16")
    text = kernel.machine.text
    before_change = text.before_change
    assert before_change is not None

    def asked(va: int, size: int) -> None:
        before_change(va, size)
        watched.execute_patches(Calls.ALL)

    monkeypatch.setattr(text, "before_change", asked)
    enable(kernel, "seen", "vfs_read")
    assert watched.execute_patches(Calls.READS)
