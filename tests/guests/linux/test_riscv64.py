"""Debian's riscv64 kernel: it boots, and clients use its files and its own tracefs."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
from collections.abc import Iterator
from errno import ENOEXEC, EOPNOTSUPP
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from elftools.elf.elffile import ELFFile

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import kernel_as_booted, started
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.initramfs import BOOTED
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.pc.riscv_board import (
    INVALID_PARAMETER,
    NOT_SUPPORTED,
    TIMER_INTERRUPT,
    SbiBoard,
)
from emulated_kernel.image.debug_files import build_id
from emulated_kernel.image.linux.debug_file import linux_debug_file
from emulated_kernel.image.linux.linked_module import link_modules
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, open_kernel
from emulated_kernel.image.linux.open_image import is_linux, open_vmlinux
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.cli.main import main
from kprobefs.measure.coverage import by_verdict, coverage
from kprobefs.measure.coverage_subject import linux_image
from kprobefs.mount_options import chosen_cpu
from tests.guests.linux.debian_kernel import SEED, own_cache
from tests.image.linux import made
from tests.image.linux.debian import package
from tests.kernel.gdb_client import GdbClient, Request

META = "linux-image-riscv64"
SUITE = "trixie"
CONSOLE = 0x4442434E
TIME = 0x54494D45


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    path = package(META, SUITE, "riscv64")
    with own_cache(META, SUITE):
        yield path


@pytest.fixture(scope="module")
def tasks(image: Path) -> Iterator[LinuxTasks]:
    guest = started(str(image), SEED)
    yield guest
    guest.machine.close()


@pytest.fixture(scope="module")
def kernel(image: Path) -> LinuxKernel:
    return open_kernel(str(image))


@pytest.fixture(scope="module")
def mount(image: Path) -> Iterator[Mount]:
    served = native_mount(started(str(image), SEED), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    yield served
    served.close()


def read(mount: Mount, client: Client, path: str) -> bytes:
    file = mount.open(client, path, os.O_RDONLY)
    try:
        return mount.read(client, file, 1 << 20, 0)
    finally:
        mount.release(file)


def write(mount: Mount, client: Client, path: str, text: bytes) -> None:
    file = mount.open(client, path, os.O_WRONLY)
    try:
        assert mount.write(client, file, text, 0) == len(text)
    finally:
        mount.release(file)


# The kernel


def test_clients_take_turns(tasks: LinuxTasks) -> None:
    """Each task is woken in the middle of others' work, and keeps its own memory and credentials."""
    calls = LinuxSyscalls(tasks)
    clients = [tasks.fork(tasks.init, pid) for pid in (4001, 4002)]
    assert [client.pid for client in clients] == [4001, 4002]
    for turn in range(3):
        for client in clients:
            path = f"/scratch/turn-{client.pid}"
            fd = calls.open(client, path, os.O_RDWR | os.O_CREAT, 0o600)
            text = f"{client.pid} {turn}".encode()
            assert calls.write(client, fd, text, None) == len(text)
            count = calls.begin_read(client, fd, 100, 0, may_block=False)
            assert calls.read_data(client, count, 100) == text
            calls.close(client, fd)
    for client in clients:
        calls.on_path(tasks.init, "unlinkat", f"/scratch/turn-{client.pid}", 0)
        tasks.exit(client)
        assert not client.alive
    assert b"riscv64" in calls.read_all("/proc/version")


def test_the_memory_of_ended_tasks_is_freed(tasks: LinuxTasks) -> None:
    """Time passes for the kernel, so that RCU frees what many short processes leave."""
    calls = LinuxSyscalls(tasks)

    def free() -> int:
        return int(calls.read_all("/proc/meminfo").split(b"MemFree:")[1].split()[0])

    before = free()
    for pid in range(6000, 6160):
        tasks.exit(tasks.fork(tasks.init, pid))
    assert free() > before - 3000


def test_a_sleep_passes_guest_time(tasks: LinuxTasks) -> None:
    client = tasks.fork(tasks.init, 4003)
    tasks.copy_to_user(client, 0x600000, struct.pack("<2q", 1, 0))
    before = tasks.machine.pc.tsc
    assert tasks.call(client, tasks.machine.abi.syscalls["nanosleep"], 0x600000, 0) == 0
    passed = (tasks.machine.pc.tsc - before) / tasks.machine.pc.khz / 1000
    assert 1 <= passed < 1.1
    tasks.exit(client)


def test_attributes_from_dentries_and_from_a_call(tasks: LinuxTasks) -> None:
    """The host reads the same attributes from the kernel's memory as newfstatat(2) returns."""
    calls = LinuxSyscalls(tasks)
    fd = calls.open(tasks.init, "/scratch/a name of some length", os.O_WRONLY | os.O_CREAT, 0o640)
    calls.write(tasks.init, fd, b"twelve bytes", None)
    calls.close(tasks.init, fd)
    seen = tasks.files.lstat("/scratch/a name of some length")
    calls.on_path(tasks.init, "newfstatat", "/scratch/a name of some length", 0x602000, 0x100)
    assert seen is not None
    assert seen._replace(is_paged=False, rdev=0) == calls._stat()
    assert (seen.size, seen.mode & 0o777) == (12, 0o640)
    assert BOOTED <= seen.mtime_ns // 10**9 < BOOTED + 3600


# A mount of its own tracefs


def test_its_own_events_and_kprobes(mount: Mount) -> None:
    """Its kprobes count hits at places behind a function's entry, which they refuse."""
    client = Client(5001, 0, 0)
    mount.release(mount.create(client, "/scratch/greeting", 0o644, os.O_WRONLY))
    write(mount, client, "/scratch/greeting", b"hello\n")
    with pytest.raises(KernelError):
        write(mount, client, "/kprobe_events", b"p:entry vfs_read\n")
    write(mount, client, "/kprobe_events", b"p:inside vfs_read+4\n")
    write(mount, client, "/tracing/events/kprobes/inside/enable", b"1\n")
    write(mount, client, "/tracing/events/sched/sched_switch/enable", b"1\n")
    assert read(mount, client, "/scratch/greeting") == b"hello\n"
    assert read(mount, Client(5002, 0, 0), "/scratch/greeting") == b"hello\n"
    write(mount, client, "/tracing/events/enable", b"0\n")
    name, hits, missed = read(mount, client, "/kprobe_profile").split()
    assert (name, missed) == (b"inside", b"0")
    assert int(hits) >= 2
    assert b"sched_switch: prev_comm=" in read(mount, client, "/tracing/trace")


def test_an_image_that_is_cut_off(image: Path, tmp_path: Path) -> None:
    data = bytes(open_vmlinux(str(image)).segments[0].data)
    cut = tmp_path / "Image"
    cut.write_bytes(data[: -(1 << 20)])
    with pytest.raises(KernelError, match="truncated") as refused:
        open_kernel(str(cut))
    assert refused.value.errno == ENOEXEC


def test_the_file_for_debuggers_has_the_build_id(kernel: LinuxKernel) -> None:
    """The core has it in VMCOREINFO, by which drgn finds out whether both belong together."""
    assert kernel.build_id
    assert build_id(ELFFile(io.BytesIO(linux_debug_file(kernel)))) == kernel.build_id


def test_coverage(image: Path) -> None:
    """Coverage uses the rules of the RISC-V series, although this kernel has no optprobes."""
    (subject,) = linux_image(str(image))
    (found,) = coverage([subject.of_functions("vfs_r*")], None)
    counts = by_verdict(found.total)
    assert found.judge.profile.name == "riscv-optprobes-2023"
    assert found.pairs is not None
    assert counts["instructions"] == sum(counts.values()) / 2 > 1000
    assert counts["instructions"] > found.pairs > counts["optimized"] > counts["instructions"] / 5
    assert counts["ftrace"] == 0


def test_check(image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Definitions are checked by the kernel's own interface, which has $arg*, and by RISC-V's registers."""
    file = tmp_path / "x.probes"
    file.write_text("p:a vfs_read $arg*\np:b vfs_read+9\np:c vfs_read ax=%ax\nr:d vfs_read $retval\n")
    assert main(["check", str(file), "--image", str(image), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    outcomes = [line["outcome"] for line in found["kernels"][0]["lines"]]
    assert outcomes == ["optimized", "EILSEQ", "EINVAL", "optimized"]


def test_explain(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--image", str(image), "vfs_read+8"]) == 0
    text = capsys.readouterr().out
    assert "vfs_read+0x8: optimized" in text
    assert "c.addi16sp sp, -0xa0" in text
    assert "buf (char *): buf=%a1:x64" in text


# The forms of its file


def made_image(size: int = 8192) -> bytes:
    header = struct.pack("<8xQQ24x", 0x200000, size).ljust(0x30, b"\0") + b"RISCV\0\0\0RSC\x05"
    return header.ljust(size, b"x")


def zboot(payload: bytes) -> bytes:
    return struct.pack("<4s4sII", b"MZ\0\0", b"zimg", 64, len(payload)).ljust(64, b"\0") + payload


@pytest.mark.parametrize(
    "packed",
    [
        made_image(),
        gzip.compress(made_image()),
        zboot(gzip.compress(made_image())),
        made.elf([(0xFFFFFFFF80000000, made_image())], machine=243),
        made.deb({"./boot/vmlinux-6.12": made_image()}),
    ],
    ids=["plain", "gzip", "zboot", "vmlinux", "package"],
)
def test_forms_of_an_image(packed: bytes, tmp_path: Path) -> None:
    path = tmp_path / "Image"
    path.write_bytes(packed)
    assert is_linux(path)
    found = open_vmlinux(str(path))
    assert found.architecture == "riscv64"
    assert bytes(found.segments[0].data) == made_image()


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (made_image() + b"x", "its header says"),
        (made_image()[:8] + bytes(8) + made_image()[16:], "its text offset is 0x0"),
        (gzip.compress(made_image())[:-20], "damaged gzip data"),
        (zboot(gzip.compress(made_image()))[:-20], "truncated"),
        (zboot(gzip.compress(b"MZ".ljust(0x30, b"\0") + b"RISCV".ljust(100))), "another RISC-V"),
        (b"MZ".ljust(0x30, b"\0") + b"RISCV".ljust(100), "another RISC-V"),
    ],
    ids=[
        "longer than its header says",
        "no MMU",
        "gzip",
        "zboot",
        "another RISC-V in zboot",
        "another RISC-V",
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


def test_no_production_cpu_is_shown(image: Path) -> None:
    cpu = chosen_cpu("rome")
    with pytest.raises(KernelError, match=r"for riscv64, .* omit --cpu") as refused:
        kernel_as_booted(str(image), SEED, cpu, lambda _done, _total: None)
    assert refused.value.errno == EOPNOTSUPP


def test_module_files_are_refused() -> None:
    kernel = cast(LinuxKernel, SimpleNamespace(architecture="riscv64"))
    with pytest.raises(KernelError, match=r"modules for riscv64 cannot be read .*; mount it") as refused:
        link_modules(kernel, [])
    assert refused.value.errno == EOPNOTSUPP


# The firmware


def test_firmware_calls() -> None:
    board = SbiBoard(1)
    ram = memoryview(bytearray(b"0123456789"))
    assert board.call(0x12345678, 0, (0, 0), ram) == (NOT_SUPPORTED, 0)
    assert board.call(CONSOLE, 0, (4, 3), ram) == (0, 4)
    assert board.call(CONSOLE, 0, (8, 3), ram) == (INVALID_PARAMETER, 0)
    assert bytes(board.console) == b"3456"
    assert board.timer_vector is None
    assert board.call(TIME, 0, (10**9 + 5, 0), ram) == (0, 0)
    assert (board.timer_vector, board.cleared) == (TIMER_INTERRUPT, 1 << TIMER_INTERRUPT)
    assert board.call(TIME, 0, ((1 << 64) - 1, 0), ram) == (0, 0)
    assert board.timer_vector is None


def test_a_debugger_steps_over_probes(mount: Mount, kernel: LinuxKernel) -> None:
    """A step over a probe of the kernel's own kprobes ends at the next instruction, also of a branch."""
    reader = Client(5010, 0, 0)
    handle = mount.create(reader, "/scratch/stepped", 0o644, os.O_RDWR)
    mount.write(reader, handle, b"hello", 0)
    start = kernel.required("vfs_read")
    path = read(mount, reader, "/machine/gdb").decode().strip()

    def act() -> bytes:
        return mount.read(reader, handle, 16, 0)

    def stopped(place: int) -> tuple[GdbClient, Request]:
        client = GdbClient(path, "riscv64")
        return client, client.break_at(place, act)

    client, request = stopped(start)
    places = [start, *(client.step() for _ in range(13 + 2))]
    client.close()
    assert request.done() == b"hello"
    for number in (4, 6, 13):
        place = places[number]
        write(mount, reader, "/tracing/kprobe_events", f"p:here vfs_read+{place - start}\n".encode())
        write(mount, reader, "/tracing/events/kprobes/here/enable", b"1")
        client, request = stopped(place)
        assert client.memory(place, 2).hex() in ("0290", "7300")
        assert [client.step(), client.step()] == places[number + 1 : number + 3]
        client.close()
        assert request.done() == b"hello"
        # gdb steps by breakpoints, passes a breakpoint in memory by a write of ip, and takes c.ebreak for a
        # jump to 0.
        size = 2 if places[number + 1] - place == 2 else 4
        for words in (
            ("Z0,0,2",),
            (f"P20={(place + size).to_bytes(8, 'little').hex()}", f"Z0,{place + size:x},2"),
        ):
            client, request = stopped(place)
            assert [client.ask(word) for word in words] == ["OK"] * len(words)
            assert client.ask("c") == "T05thread:1;"
            assert client.ip == places[number + 1]
            client.close()
            assert request.done() == b"hello"
        write(mount, reader, "/tracing/events/kprobes/here/enable", b"0")
        write(mount, reader, "/tracing/kprobe_events", b"-:here\n")
    mount.release(handle)
