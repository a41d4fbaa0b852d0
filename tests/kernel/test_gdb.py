"""machine/gdb: GDB's remote protocol. The debugger holds the guest between commands."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from emulated_kernel import Client, Kernel, KernelError, MachineConfig, Mount
from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.guests.common import gdb_server
from emulated_kernel.image.linux.debug_file import builtin_debug_file
from emulated_kernel.machine.debugger import Debugger
from emulated_kernel.machine.memory_layout import TEXT_SPACE_SIZE
from tests.kernel.gdb_client import TIMEOUT, GdbClient, Request

ROOT = Client(os.getpid(), 0, 0)
PACKETS = 600


class Guest:
    """A kernel with a file in scratch/, whose read hits probes."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.kernel = Kernel(MachineConfig(arch=arch, cpus=2))
        self.mount: Mount = self.kernel.mount()
        self.handle = self.mount.create(ROOT, "/scratch/file", 0o644, os.O_RDWR)
        self.mount.write(ROOT, self.handle, b"hello", 0)
        self.path = self.kernel.read_file("machine/gdb").strip()

    def read(self) -> bytes:
        return self.mount.read(ROOT, self.handle, 16, 0)

    def address(self, name: str) -> int:
        address = self.kernel.machine.image.kallsyms.lookup_name(name)
        assert address is not None
        return address

    def define(self, text: str) -> None:
        """Define and enable a probe event, after all other probe events were removed."""
        self.kernel.write_file("tracing/events/enable", "0")
        with self.kernel.lock:
            self.kernel.tracing.kprobe_events.clear()
        self.kernel.write_file("tracing/kprobe_events", text)
        self.kernel.write_file("tracing/events/kprobes/enable", "1")


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    made = Guest("x86_64")
    yield made
    made.kernel.close()


@pytest.fixture
def gdb(guest: Guest) -> Iterator[GdbClient]:
    client = GdbClient(guest.path)
    yield client
    client.close()
    assert Request(guest.read).done() == b"hello"


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_a_breakpoint_changes_no_byte(arch: str) -> None:
    guest = Guest(arch)
    with guest.kernel as kernel:
        client = GdbClient(guest.path, arch)
        place = guest.address("vfs_read")
        before = kernel.machine.memory.read(place, 16)
        assert client.ask(f"Z0,{place:x},1") == "OK"
        client.send("vCont;c")
        request = Request(guest.read)
        assert client.answer().startswith("T05thread:")
        assert client.ip == place
        assert client.memory(place, 16) == before == kernel.machine.memory.read(place, 16)
        assert not kernel.machine.text.ledger
        client.send("s")
        assert client.answer().startswith("T05")
        assert client.ip == place + len(instruction(before, arch))
        assert client.ask(f"z0,{place:x},1") == "OK"
        client.send("c")
        assert request.done() == b"hello"
        client.raw(b"\x03")
        assert client.answer().startswith("T02")
        client.close()


def instruction(code: bytes, arch: str) -> bytes:
    """Return the first instruction of `code`, which begins with the nop, or the two nops, of an fentry
    site.
    """
    if arch.startswith("riscv"):
        return code[: 4 if code[0] & 3 == 3 else 2]
    return code[:5]


def test_stepping_goes_through_a_detour(guest: Guest) -> None:
    """A debugger's steps go through the jump of an optimized probe, the detour with its breakpoint, and the
    jump back.
    """
    place = guest.address("__x64_sys_pread64") + 5
    guest.define("p:reads __x64_sys_pread64+5")
    guest.kernel.wait_for_kprobe_optimizer()
    machine = guest.kernel.machine
    assert machine.memory.read(place, 1) == b"\xe9"
    client = GdbClient(guest.path)
    client.ask(f"Z0,{place:x},1")
    client.send("c")
    request = Request(guest.read)
    client.answer()
    seen = [client.ip]
    codes = [b""]
    detours = range(machine.model.layout.text_space, machine.model.layout.text_space + TEXT_SPACE_SIZE)
    while seen[-1] == place or seen[-1] in detours:
        client.send("s")
        assert client.answer().startswith("T05")
        seen.append(client.ip)
        codes.append(client.memory(client.ip, 5))
    assert seen[0] == place
    assert len(set(seen)) == len(seen)
    region = guest.kernel.kprobes.probe_checker.optimized_region(place)
    assert isinstance(region, Region)
    assert (region.end, codes[-2][0]) == (seen[-1], 0xE9)
    assert any(code[0] == 0xCC for code in codes[1:])
    copy = machine.text.original(place, region.end - place)
    assert any(client.memory(ip, len(copy)) == copy for ip in seen[1:])
    client.close()
    assert request.done() == b"hello"


def test_a_step_over_an_armed_probe_ends_after_it(guest: Guest) -> None:
    """A debugger's step at a probe's breakpoint runs the handlers and the insn slot, and ends after the
    probed instruction.
    """
    guest.define("p:reads vfs_read+5")
    place = guest.address("vfs_read") + 5
    assert guest.kernel.machine.memory.read(place, 1) == b"\xcc"
    client = GdbClient(guest.path)
    client.ask(f"Z0,{place:x},1")
    client.send("c")
    request = Request(guest.read)
    client.answer()
    assert client.ip == place
    client.send("s")
    client.answer()
    assert client.ip == place + 3
    client.close()
    assert request.done() == b"hello"


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_a_step_over_an_emulated_instruction_ends_after_it(arch: str) -> None:
    """A debugger's step at a probe on an emulated instruction ends after this instruction.

    The compiled handler ends with a relocated form of the instruction.
    """
    guest = Guest(arch)
    with guest.kernel as kernel:
        start = guest.address("vfs_read")
        steps = steps_from(guest, start, 40)
        seen = set()
        for place, following in itertools.pairwise(steps):
            if kernel.machine.text.original(place, 1) in seen or not start < place < start + 100:
                continue
            try:
                guest.define(f"p:here vfs_read+{place - start}")
            except KernelError:
                continue
            head = kernel.kprobes.table.get(place)
            if head is None or head.insn is None or head.insn.slot is not None:
                continue
            for _ in range(2):
                assert guest.read() == b"hello"
            assert head.stub is not None
            assert head.stub.region is not None
            assert steps_from(guest, place, 1) == [place, following]
            seen.add(kernel.machine.text.original(place, 1))
        assert len(seen) >= 2


def steps_from(guest: Guest, place: int, steps: int) -> list[int]:
    """Stop a read at `place`, and return the addresses at which a debugger's steps from there end."""
    client = GdbClient(guest.path, guest.arch)
    assert client.ask(f"Z0,{place:x},1") == "OK"
    client.send("c")
    request = Request(guest.read)
    client.answer()
    found = [client.ip]
    for _ in range(steps):
        client.send("s")
        client.answer()
        found.append(client.ip)
    client.close()
    assert request.done() == b"hello"
    return found


def test_machine_is_served_while_gdb_holds_the_guest(guest: Guest, gdb: GdbClient) -> None:
    place = guest.address("vfs_read")
    gdb.ask(f"Z0,{place:x},1")
    gdb.send("c")
    request = Request(guest.read)
    gdb.answer()

    def core() -> bytes:
        handle = guest.mount.open(ROOT, "/machine/vmcore", os.O_RDONLY)
        data = guest.mount.read(ROOT, handle, 1 << 16, 0)
        guest.mount.release(handle)
        return data

    data = Request(core).done()
    assert isinstance(data, bytes)
    # The registers of the CPU are those at the breakpoint.
    assert place.to_bytes(8, "little") in data

    def text() -> bytes:
        handle = guest.mount.open(ROOT, "/machine/tasks", os.O_RDONLY)
        found = guest.mount.read(ROOT, handle, 1 << 16, 0)
        guest.mount.release(handle)
        return found

    assert b"kthreadd" in Request(text).done()  # type: ignore[operator]

    def link() -> int:
        with pytest.raises(KernelError) as caught:
            guest.mount.readlink(ROOT, "/machine/tasks")
        return caught.value.errno

    assert Request(link).done() == errno.EINVAL
    assert "gdb" in [entry.name for entry in guest.mount.readdir("/machine")]
    other = Request(lambda: guest.mount.getattr("/scratch/file"))
    assert request.waits
    assert gdb.ask(f"z0,{place:x},1") == "OK"
    gdb.send("c")
    assert request.done() == b"hello"
    other.done()
    gdb.raw(b"\x03")
    gdb.answer()


def test_a_waiting_request_ends_if_its_client_is_killed(guest: Guest, gdb: GdbClient) -> None:
    assert gdb.ip
    guest.kernel.lock.is_dying = lambda _thread: True
    try:
        with pytest.raises(KernelError) as error:
            Request(guest.read).done()
    finally:
        guest.kernel.lock.is_dying = lambda _thread: False
    assert error.value.errno == errno.EINTR


def test_an_interrupt_stops_a_guest_that_does_not_run(guest: Guest, gdb: GdbClient) -> None:
    for _ in range(3):
        gdb.send("c")
        assert Request(guest.read).done() == b"hello"
        gdb.raw(b"\x03")
        assert gdb.answer().startswith("T02")


def test_registers_and_memory(guest: Guest, gdb: GdbClient) -> None:
    machine = guest.kernel.machine
    whole = bytes.fromhex(gdb.ask("g"))
    values = [int.from_bytes(whole[at : at + 8], "little") for at in range(0, 17 * 8, 8)]
    regs = machine.regs
    assert values[:4] == [regs.ax, regs.bx, regs.cx, regs.dx]
    assert values[15:] == [regs.r15, regs.ip]
    assert gdb.ask("P0=" + (0x1234).to_bytes(8, "little").hex()) == "OK"
    assert machine.regs.ax == 0x1234
    assert gdb.ask("P0=" + values[0].to_bytes(8, "little").hex()) == "OK"
    # The other CPU is another thread, whose registers can only be read.
    first, second = sorted(gdb.ask("qfThreadInfo")[1:].split(","))
    assert (first, second) == ("1", "2")
    positions = machine.positions()
    for number, (ip, _) in enumerate(positions, 1):
        assert gdb.ask(f"Hg{number}") == "OK"
        assert gdb.ip == ip
    text = guest.address("vfs_read")
    assert gdb.ask(f"M{text:x},1:90") == "E0e"
    assert gdb.ask("m10,4") == "E0e"
    data = guest.address("init_task")
    kept = gdb.memory(data, 4)
    assert gdb.ask(f"M{data:x},4:{kept.hex()}") == "OK"
    assert "<architecture>i386:x86-64</architecture>" in gdb.ask("qXfer:features:read:target.xml:0,400")


def test_a_debugger_that_leaves_lets_the_guest_run(guest: Guest) -> None:
    """If a debugger closes its connection while the guest is stopped at a breakpoint, the guest continues."""
    client = GdbClient(guest.path)
    client.ask(f"Z0,{guest.address('vfs_read'):x},1")
    client.send("c")
    request = Request(guest.read)
    client.answer()
    client.close()
    assert request.done() == b"hello"


def test_closing_the_kernel_ends_the_session() -> None:
    guest = Guest("x86_64")
    client = GdbClient(guest.path)
    assert client.ip
    Request(guest.kernel.close).done()
    assert not os.path.exists(guest.path)
    client.close()


def test_closing_ends_a_session_whose_debugger_reads_no_answers() -> None:
    guest = Guest("x86_64")
    client = GdbClient(guest.path)
    client.send_until_blocked(f"m{guest.address('vfs_read'):x},1000")
    assert Request(guest.kernel.close).done() is None
    client.close()


def test_detaching_resumes_a_run_that_stops_meanwhile(guest: Guest) -> None:
    debugger = Debugger(guest.kernel.machine, guest.kernel.lock)
    debugger.attach(lambda: False)
    debugger.breakpoints.add(guest.address("vfs_read"))
    debugger.resume(step=False)
    reached = threading.Event()
    may_stop = threading.Event()
    note = debugger._note_hold

    def late_note() -> None:
        reached.set()
        assert may_stop.wait(TIMEOUT)
        note()

    debugger._note_hold = late_note  # type: ignore[method-assign]
    read = Request(guest.read)
    assert reached.wait(TIMEOUT)

    def ends() -> bool:
        may_stop.set()
        return False

    assert Request(lambda: debugger.detach(ends)).done() is None
    assert read.done() == b"hello"


def test_any_packet_is_answered(guest: Guest) -> None:
    """After random, damaged and oversized packets, the guest works, and another debugger can connect."""
    dice = random.Random(1)
    words = (
        b"m",
        b"M",
        b"g",
        b"G",
        b"p",
        b"P",
        b"Z0,",
        b"z1,",
        b"H",
        b"T",
        b"q",
        b"vCont",
        b"X",
        b"?",
        b"D;",
    )
    tail = b"0123456789abcdef,:;=-$#}\x00\xff"
    client = GdbClient(guest.path)
    for _ in range(PACKETS):
        body = dice.choice(words) + bytes(dice.choice(tail) for _ in range(dice.randrange(24)))
        body = body.replace(b"#", b"").replace(b"$", b"")
        if body.startswith((b"vCont;c", b"vCont;s", b"D;", b"M", b"G", b"P")):
            continue
        assert client.ask(body) is not None
    for hostile in (
        "mffffffffffffffff,ffffffff",
        "m0,ffffffff",
        "Hgffffffff",
        "pffff",
        "qXfer:features:read:target.xml:ffffffff,ffffffff",
    ):
        assert client.ask(hostile) in ("E01", "E0e", "l", "xxxxxxxx")
    client.raw(b"$" + bytes(40 << 10))
    with pytest.raises((EOFError, OSError)):
        client.answer()
    client.close()
    again = GdbClient(guest.path)
    assert again.ip
    again.close()
    assert Request(guest.read).done() == b"hello"


def test_only_the_owner_can_open_the_socket(guest: Guest) -> None:
    assert stat.S_IMODE(os.stat(guest.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(guest.path)).st_mode) == 0o700
    assert stat.S_IMODE(guest.mount.getattr("/machine/gdb").mode) == 0o400


def test_gdb_breaks_and_shows_the_file(guest: Guest, tmp_path: Path) -> None:
    gdb = shutil.which("gdb")
    if gdb is None:
        pytest.skip("gdb is not installed")
    (tmp_path / "debug").write_bytes(builtin_debug_file(guest.kernel.machine.image))
    commands = (
        "break *vfs_read",
        "continue",
        "p ((struct file *)$rdi)->f_pos",
        "stepi",
        "info threads",
        "delete",
        "detach",
    )
    words = [word for command in commands for word in ("-ex", command)]
    run = [gdb, "-nx", "-batch", "-ex", f"target remote {guest.path}", *words, str(tmp_path / "debug")]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # gdb stops the guest at the breakpoint during one of these reads.
    while process.poll() is None:
        assert Request(guest.read).done() == b"hello"
    assert process.stdout is not None
    shown = process.stdout.read()
    process.stdout.close()
    assert "hit Breakpoint 1" in shown, shown
    assert "$1 = 5" in shown
    assert "(CPU 1)" in shown
    assert "detached" in shown


def test_an_error_of_accept_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = socket.socket.accept
    errors = [errno.EMFILE, errno.ECONNABORTED]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise OSError(errors.pop(), "")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with Kernel(MachineConfig()) as kernel:
        client = GdbClient(kernel.read_file("machine/gdb").strip())
        assert client.ask("qAttached") == "1"
        client.close()
    assert not errors


def test_directories_of_killed_daemons_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("kprobefs-gdb-dead", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "socket").touch()
    with Kernel(MachineConfig()) as one, Kernel(MachineConfig()) as other:
        paths = [Path(kernel.read_file("machine/gdb").strip()) for kernel in (one, other)]
        assert {path.parent for path in paths} == {*tmp_path.iterdir()} - {tmp_path / "another"}
        assert all(path.is_socket() for path in paths)
    assert [*tmp_path.iterdir()] == [tmp_path / "another"]


def test_nothing_is_left_of_a_server_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuse(*_arguments: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with Kernel(MachineConfig()) as kernel:
        monkeypatch.setattr(gdb_server, "start_thread", refuse)
        with pytest.raises(RuntimeError):
            kernel.read_file("machine/gdb")
        assert not [*tmp_path.iterdir()]
