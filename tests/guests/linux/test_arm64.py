"""Debian's arm64 cloud kernel: it boots, and clients use its files and its own tracefs."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
from collections.abc import Iterator
from errno import ENOEXEC, ENOTDIR
from pathlib import Path

import pytest

from emulated_kernel.arch.arm64.insn import B_COND, words_of
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import started
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.pc.arm64_cpu import Arm64LinuxCpu
from emulated_kernel.guests.linux.pc.gic_board import (
    TIMER_FIRED,
    TIMER_INTERRUPT,
    TIMER_MASKED,
    TIMER_ON,
    GicBoard,
)
from emulated_kernel.guests.linux.probing.tracing import printk_formats
from emulated_kernel.guests.linux.table_cache import kernel_from_file
from emulated_kernel.image.linux.arm64_image import Arm64Image
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.open_image import is_linux, open_vmlinux
from emulated_kernel.machine.cpu import arm64
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.cli.main import main
from kprobefs.measure.coverage import by_verdict, coverage
from kprobefs.measure.coverage_subject import linux_image
from tests.guests.linux.debian_kernel import SEED, own_cache
from tests.guests.linux.processor_tests import KernelTests, read, write
from tests.image.linux import made
from tests.image.linux.debian import package
from tests.kernel.gdb_client import GdbClient, Request

META = "linux-image-cloud-arm64"
SUITE = "trixie"


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    path = package(META, SUITE, "arm64")
    with own_cache(META, SUITE):
        yield path


@pytest.fixture(scope="module")
def kernel(image: Path) -> LinuxKernel:
    return kernel_from_file(str(image))


@pytest.fixture(scope="module")
def tasks(image: Path) -> Iterator[LinuxTasks]:
    guest = started(str(image), SEED)
    yield guest
    guest.machine.close()


@pytest.fixture(scope="module")
def mount(image: Path) -> Iterator[Mount]:
    served = native_mount(started(str(image), SEED), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    yield served
    served.close()


# The kernel


class TestKernel(KernelTests):
    """Tests of the kernel for arm64."""

    compiler = b"aarch64-linux-gnu"


def test_a_call_saves_the_state_of_the_processor(tasks: LinuxTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call copies the CPU's PSTATE to SPSR_EL1, in each kind of call.

    The kinds are calls after stores to pages, after calls of another client, and after sleeps.
    """
    cpu = tasks.machine.cpu
    assert isinstance(cpu, Arm64LinuxCpu)
    call, engine = cpu.syscall, tasks.machine.engine
    saved = []

    def checked(ip: int, values: tuple[int, ...] | None = None) -> None:
        before = engine.reg_read(arm64.PSTATE)
        call(ip, values)
        saved.append((values is not None, before, arm64.read_system_register(engine, arm64.SPSR_EL1)))

    monkeypatch.setattr(cpu, "syscall", checked)
    calls = LinuxSyscalls(tasks)
    clients = [tasks.fork(tasks.init, pid) for pid in (4004, 4005)]
    for size in (1, 5 * 4096):
        for client in clients:
            fd = calls.open(client, "/scratch/state", os.O_RDWR | os.O_CREAT, 0o600)
            calls.write(client, fd, bytes(size), 0)
            calls.open(client, "/scratch/state", os.O_RDONLY, closed=fd)
            tasks.copy_to_user(client, 0x600000, struct.pack("<2q", 0, 10_000_000))
            tasks.call(client, tasks.machine.abi.syscalls["nanosleep"], 0x600000, 0)
    for client in clients:
        tasks.exit(client)
    # If the host has routines, Python makes only the first call of a run.
    assert {begins for begins, *_ in saved} == ({True} if tasks.machine.hooks.is_native else {True, False})
    assert [before for _, before, _ in saved] == [state for *_, state in saved]


def test_a_flag_of_open_that_has_a_value_of_its_own(tasks: LinuxTasks) -> None:
    calls = LinuxSyscalls(tasks)
    calls.close(tasks.init, calls.open(tasks.init, "/scratch", os.O_RDONLY | os.O_DIRECTORY))
    with pytest.raises(KernelError) as refused:
        calls.open(tasks.init, "/proc/version", os.O_RDONLY | os.O_DIRECTORY)
    assert refused.value.errno == ENOTDIR


def test_a_restart_ends_the_machine(image: Path) -> None:
    guest = started(str(image), SEED)
    calls = LinuxSyscalls(guest)
    fd = calls.open(guest.init, "/proc/sysrq-trigger", os.O_WRONLY)
    with pytest.raises(GuestFault, match="it has restarted"):
        calls.write(guest.init, fd, b"b", None)
    guest.machine.close()


# A mount of the kernel's own tracefs


def test_its_own_kprobes_record(mount: Mount) -> None:
    """Kprobes of the kernel record hits at an entry, at a return and inside a function."""
    client = Client(5001, 0, 0)
    mount.release(mount.create(client, "/scratch/greeting", 0o644, os.O_WRONLY))
    write(mount, client, "/scratch/greeting", b"hello\n")
    defined = b"p:entry vfs_read count=$arg3\nr:back vfs_read $retval\np:inside vfs_read+16\n"
    write(mount, client, "/kprobe_events", defined)
    for event in ("entry", "back", "inside"):
        write(mount, client, f"/tracing/events/kprobes/{event}/enable", b"1\n")
    write(mount, client, "/tracing/events/sched/sched_switch/enable", b"1\n")
    assert read(mount, client, "/scratch/greeting") == b"hello\n"
    assert read(mount, Client(5002, 0, 0), "/scratch/greeting") == b"hello\n"
    write(mount, client, "/tracing/events/enable", b"0\n")
    profile = [line.split() for line in read(mount, client, "/kprobe_profile").splitlines()]
    assert profile == [[name, b"2", b"0"] for name in (b"entry", b"back", b"inside")]
    trace = read(mount, client, "/tracing/trace")
    assert trace.count(b"back: (ksys_read+") == 2
    assert trace.count(b"arg1=6") == 2
    assert b"sched_switch: prev_comm=" in trace
    write(mount, client, "/kprobe_events", b"")


def test_its_function_tracer(mount: Mount) -> None:
    client = Client(5003, 0, 0)
    mount.release(mount.create(client, "/scratch/traced", 0o644, os.O_WRONLY))
    write(mount, client, "/tracing/set_ftrace_filter", b"vfs_write\n")
    write(mount, client, "/tracing/current_tracer", b"function\n")
    for _ in range(3):
        write(mount, client, "/scratch/traced", b"hello\n")
    assert read(mount, client, "/tracing/trace").count(b": vfs_write <-ksys_") == 3
    write(mount, client, "/tracing/current_tracer", b"nop\n")
    write(mount, client, "/tracing/set_ftrace_filter", b"\n")


def test_formats_are_those_of_its_own_tracefs(mount: Mount, kernel: LinuxKernel) -> None:
    """printk_formats() returns the lines that the kernel's own tracefs shows.

    This kernel has no trace_printk() formats, but strings in its records.
    """
    client = Client(5004, 0, 0)
    file = mount.open(client, "/tracing/printk_formats", os.O_RDONLY)
    lines = b""
    # Linux returns at most a page at a time.
    while data := mount.read(client, file, 1 << 20, len(lines)):
        lines += data
    mount.release(file)
    assert lines.count(b"\n") > 100
    assert "".join(printk_formats(kernel)).encode() == lines


def test_the_same_requests_give_the_same_trace(image: Path) -> None:
    """Two mounts with the same seed and the same requests show the same trace, because guest time depends on
    the seed.
    """
    shown = []
    for _ in range(2):
        served = native_mount(started(str(image), SEED), ProcessWatch(), Owner(0, 0), is_tracefs=False)
        write(served, Client(5005, 0, 0), "/kprobe_events", b"p:opens do_sys_openat2 name=+0(%x1):ustring\n")
        write(served, Client(5005, 0, 0), "/tracing/events/kprobes/opens/enable", b"1\n")
        write(served, Client(5005, 0, 0), "/tracing/events/sched/sched_switch/enable", b"1\n")
        for pid in (5006, 5007):
            served.release(served.create(Client(pid, 0, 0), "/scratch/made", 0o644, os.O_WRONLY))
        write(served, Client(5005, 0, 0), "/tracing/tracing_on", b"0\n")
        shown.append(read(served, Client(5005, 0, 0), "/tracing/trace"))
        served.close()
    assert shown[0].count(b"opens: ") == 4
    assert shown[0] == shown[1]


def test_a_core_of_the_machine(mount: Mount) -> None:
    """machine/vmcore is an ELF core of an arm64 machine with at least three program headers."""
    client = Client(5004, 0, 0)
    core = read(mount, client, "/machine/vmcore")
    kind, machine, count = struct.unpack_from("<HH34xH", core, 16)[0:3]
    assert (kind, machine) == (4, 183)
    assert count > 2


# Answers without a running kernel


def test_coverage(image: Path) -> None:
    """`coverage` uses kprobefs's rules of jumps, although this kernel has no optprobes."""
    (subject,) = linux_image(str(image))
    (found,) = coverage([subject.of_functions("vfs_r*")], None)
    counts = by_verdict(found.total)
    assert counts["instructions"] == sum(counts.values()) / 2 > 1000
    assert counts["optimized"] > counts["instructions"] * 0.8
    assert counts["refused"] > counts["breakpoint"] > 0 == counts["ftrace"]


def test_check(image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` uses the kernel's own interface, arm64's registers, and arm64's rules of places for probes."""
    file = tmp_path / "x.probes"
    file.write_text("p:a vfs_read $arg*\np:b vfs_read+9\np:c vfs_read ax=%ax\nr:d vfs_read $retval\n")
    assert main(["check", str(file), "--image", str(image), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    outcomes = [line["outcome"] for line in found["kernels"][0]["lines"]]
    assert outcomes == ["optimized", "EINVAL", "EINVAL", "optimized"]


def test_its_own_return_probes_trap_at_the_return(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_text("p:a vfs_read\nr:b vfs_read\n")
    for kprobes, found in (("kprobefs", [False, False]), ("kernel", [False, True])):
        assert main(["check", str(file), "--image", str(image), "--kprobes", kprobes, "--json"]) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert [line["traps_at_return"] for line in shown["kernels"][0]["lines"]] == found


def test_explain(image: Path, kernel: LinuxKernel, capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` shows that the detour of a conditional branch has the inverted branch and an unconditional
    one to the target.
    """
    words = words_of(kernel.read(kernel.required("ksys_read"), 200))
    offset = 4 * next(at for at, word in enumerate(words) if B_COND.fits(word))
    assert main(["explain", "--image", str(image), f"ksys_read+{offset:#x}"]) == 0
    text = capsys.readouterr().out
    assert f"ksys_read+{offset:#x}: optimized" in text
    assert re.search(r" b\.\w+ detour\+0x\w+  \(relocated\)\n +b ksys_read\+0x\w+  \(relocated\)", text)
    assert "buf (char *): buf=%x" in text


# Refused options


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("mount", "--kprobes", "kprobefs", "--profile", "linux-6.1"), "omit --profile"),
        (("mount", "--kprobes", "kernel", "--cpu", "haswell-ep"), "omit --cpu"),
    ],
    ids=["profile", "cpu"],
)
def test_one_line_refuses(
    image: Path, tmp_path: Path, arguments: tuple[str, ...], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *others = arguments
    if command == "mount":
        others.append(str(tmp_path))
    assert main([command, "--image", str(image), *others]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert why in line


def test_an_image_that_is_cut_off(kernel: LinuxKernel) -> None:
    """A cut-off Image is found out by the symbol _edata, because the header only has the size of the kernel
    in memory.
    """
    data = bytes(kernel.vmlinux.segments[0].data)
    end = kernel.required("_edata")
    Arm64Image(data).check_complete(end)
    with pytest.raises(KernelError, match="truncated") as refused:
        Arm64Image(data[: -(1 << 20)]).check_complete(end)
    assert refused.value.errno == ENOEXEC


def test_tables_that_the_kernel_relocates(kernel: LinuxKernel) -> None:
    """Events, system calls and ftrace sites are read from tables whose addresses the kernel relocates at
    boot.
    """
    assert {event.name for event in kernel.events} > {"sched_switch", "sys_enter"}
    assert {call.name for call in kernel.syscalls} > {"sys_openat", "sys_read"}
    assert len(kernel.mcount) > 40_000


# Forms of the kernel's file

LINKED = 0xFFFF800080000000
PLACES = (0x200, 0x208, 0x1000)


def made_image(
    size: int = 8192, *, flags: int = 2, offset: int = 0, relocations: bool = True, linked: int = LINKED
) -> bytes:
    """Return an Image whose relocation table fills in words of the Image.

    The first word becomes the Image's address. `size`, `flags`, `offset`: fields of the header, where
    `offset` is the text offset. `linked`: address for which the Image is linked.
    """
    header = struct.pack("<8x3Q", offset, size, flags).ljust(0x38, b"\0") + b"ARMd"
    data = bytearray(header.ljust(size, b"\0"))
    if relocations:
        table = b"".join(struct.pack("<3Q", linked + at, 0x403, linked + at - PLACES[0]) for at in PLACES)
        data[0x400 : 0x400 + len(table)] = table
    return bytes(data)


def zboot(payload: bytes) -> bytes:
    return struct.pack("<4s4sII", b"MZ\0\0", b"zimg", 64, len(payload)).ljust(64, b"\0") + payload


@pytest.mark.parametrize(
    "packed",
    [
        made_image(),
        gzip.compress(made_image()),
        zboot(gzip.compress(made_image())),
        made.elf([(LINKED, made_image())], machine=183),
        made.deb({"./boot/vmlinuz-6.12": made_image()}),
    ],
    ids=["plain", "gzip", "zboot", "vmlinux", "package"],
)
def test_forms_of_an_image(packed: bytes, tmp_path: Path) -> None:
    path = tmp_path / "Image"
    path.write_bytes(packed)
    assert is_linux(path)
    found = open_vmlinux(str(path))
    assert found.architecture == "arm64"
    (segment,) = found.segments
    assert segment.va == LINKED
    for at in PLACES:
        assert found.read(LINKED + at, 8) == struct.pack("<Q", LINKED + at - PLACES[0])
    assert len(segment.data) == 8192


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (made_image() + b"x", "its header says"),
        (made_image(offset=0x80000), "its text offset is 0x80000"),
        (made_image(linked=0xFFFF800008000000), "use Linux 6.5 or later"),
        (made_image(flags=6), "pages have 64 KiB"),
        (made_image(flags=3), "big-endian"),
        (made_image(relocations=False), "CONFIG_RELOCATABLE"),
        (made_image()[:60], "truncated"),
        (gzip.compress(made_image())[:-20], "damaged gzip data"),
        (zboot(gzip.compress(made_image()))[:-20], "truncated"),
    ],
    ids=[
        "long",
        "old",
        "old address",
        "large pages",
        "big-endian",
        "not relocatable",
        "short",
        "gzip",
        "zboot",
    ],
)
def test_bad_images(packed: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "Image"
    path.write_bytes(packed)
    assert is_linux(path)
    with pytest.raises(KernelError, match=why) as refused:
        open_vmlinux(str(path))
    assert refused.value.errno == ENOEXEC
    assert "\n" not in str(refused.value.strerror)


# The devices


def test_the_interrupt_controller() -> None:
    """The interrupt controller shows only enabled interrupts, lowest number first, and acknowledges an
    interrupt once.
    """
    board = GicBoard(1)
    board.set_timer(TIMER_ON, 10**9 + 5)
    assert (board.timer_vector, board.has_interrupt) == (TIMER_INTERRUPT, False)
    board.timer_fires()
    assert not board.has_interrupt
    board.write_distributor(0x100, 1 << TIMER_INTERRUPT | 1 << 5)
    board.write_distributor(0xF00, 5)
    assert board.has_interrupt
    assert [board.read_interface(0xC) for _ in range(3)] == [5, TIMER_INTERRUPT, 1023]
    assert board.timer_status == TIMER_ON | TIMER_FIRED
    board.set_timer(TIMER_ON | TIMER_MASKED, board.compare)
    assert board.timer_vector is None
    board.write_distributor(0x180, 1 << 5)
    board.write_distributor(0xF00, 5)
    assert not board.has_interrupt


def test_the_console() -> None:
    board = GicBoard(1)
    for character in b"ready":
        board.write_console_register(0, character)
    assert bytes(board.console) == b"ready"
    assert board.read_console(0x18) & 0x20 == 0


def test_a_debugger_breaks_and_steps(mount: Mount, kernel: LinuxKernel) -> None:
    reader = Client(5009, 0, 0)
    handle = mount.create(reader, "/scratch/debugged", 0o644, os.O_RDWR)
    mount.write(reader, handle, b"hello", 0)
    place = kernel.required("vfs_read")
    client = GdbClient(read(mount, reader, "/machine/gdb").decode().strip(), "arm64")
    assert client.ask(f"Z0,{place:x},4") == "OK"
    client.send("c")
    request = Request(lambda: mount.read(reader, handle, 16, 0))
    assert client.answer() == "T05thread:1;"
    assert client.ip == place
    client.send("s")
    assert client.answer() == "T05thread:1;"
    assert client.ip == place + 4
    client.close()
    assert request.done() == b"hello"
    mount.release(handle)


def test_a_debugger_steps_over_probes(mount: Mount, kernel: LinuxKernel) -> None:
    """A debugger's step over a kprobe of the kernel ends at the next instruction, also if a branch
    is probed.
    """
    reader = Client(5010, 0, 0)
    handle = mount.create(reader, "/scratch/stepped", 0o644, os.O_RDWR)
    mount.write(reader, handle, b"hello", 0)
    start = kernel.required("vfs_read")
    path = read(mount, reader, "/machine/gdb").decode().strip()

    def act() -> bytes:
        return mount.read(reader, handle, 16, 0)

    def stopped(place: int) -> tuple[GdbClient, Request]:
        client = GdbClient(path, "arm64")
        return client, client.break_at(place, act)

    client, request = stopped(start)
    places = [start, *(client.step() for _ in range(13 + 2))]
    client.close()
    assert request.done() == b"hello"
    for number in (4, 7):
        place = places[number]
        write(mount, reader, "/tracing/kprobe_events", f"p:here vfs_read+{place - start}\n".encode())
        write(mount, reader, "/tracing/events/kprobes/here/enable", b"1")
        client, request = stopped(place)
        assert client.memory(place, 4)[2:] == b"\x20\xd4"
        assert [client.step(), client.step()] == places[number + 1 : number + 3]
        client.close()
        assert request.done() == b"hello"
        write(mount, reader, "/tracing/events/kprobes/here/enable", b"0")
        write(mount, reader, "/tracing/kprobe_events", b"-:here\n")
    mount.release(handle)
