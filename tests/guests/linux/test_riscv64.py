"""Debian's riscv64 kernel: it boots, and clients use its files and its own tracefs."""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Iterator
from errno import ENOEXEC, EOPNOTSUPP
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import kernel_as_booted, started
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.pc.riscv_board import (
    INVALID_PARAMETER,
    NOT_SUPPORTED,
    TIMER_INTERRUPT,
    SbiBoard,
)
from emulated_kernel.guests.linux.table_cache import kernel_from_file
from emulated_kernel.image.linux.linked_module import link_modules
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, open_kernel
from emulated_kernel.image.linux.open_image import is_linux, open_vmlinux
from emulated_kernel.machine.core_dump import RAM_OFFSET
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.cli.main import main
from kprobefs.measure.coverage import Source, by_verdict, coverage
from kprobefs.measure.coverage_subject import linux_image
from kprobefs.mount_options import chosen_cpu
from tests.guests.linux.debian_kernel import SEED, own_cache
from tests.guests.linux.processor_tests import KernelTests, read, write
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
    return kernel_from_file(str(image))


@pytest.fixture(scope="module")
def mount(image: Path) -> Iterator[Mount]:
    served = native_mount(started(str(image), SEED), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    yield served
    served.close()


# The kernel


class TestKernel(KernelTests):
    """Tests of the kernel for riscv64."""

    compiler = b"riscv64"


# A mount of the kernel's own tracefs


def test_its_own_events_and_kprobes(mount: Mount) -> None:
    """Kprobes of the kernel refuse the entry of a function, and count hits at a later instruction."""
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


def test_its_core_has_vmcoreinfo(mount: Mount) -> None:
    """machine/vmcore has VMCOREINFO, which debuggers need. This kernel's VMCOREINFO has no KERNELOFFSET."""
    headers = read(mount, Client(5003, 0, 0), "/machine/vmcore")[:RAM_OFFSET]
    assert b"VMCOREINFO\0" in headers
    assert b"SYMBOL(init_uts_ns)=" in headers


def test_an_image_that_is_cut_off(image: Path, tmp_path: Path) -> None:
    data = bytes(open_vmlinux(str(image)).segments[0].data)
    cut = tmp_path / "Image"
    cut.write_bytes(data[: -(1 << 20)])
    with pytest.raises(KernelError, match="truncated") as refused:
        open_kernel(str(cut))
    assert refused.value.errno == ENOEXEC


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
    (own,) = coverage(Source(image=str(image), pattern="vfs_r*", kprobes="kernel").group(), None)
    counts_of_own = by_verdict(own.total)
    assert counts_of_own["instructions"] == counts["instructions"]
    assert counts_of_own["optimized"] == counts_of_own["ftrace"] == 0
    # The kernel refuses each function's entry, too.
    assert counts_of_own["refused"] == counts["refused"] + len(own.symbols) > len(own.symbols)


def test_check(image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Definitions are checked by the kernel's own interface, which has $arg*, and by RISC-V's registers."""
    file = tmp_path / "x.probes"
    file.write_text("p:a vfs_read $arg*\np:b vfs_read+9\np:c vfs_read ax=%ax\nr:d vfs_read $retval\n")
    assert main(["check", str(file), "--image", str(image), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    outcomes = [line["outcome"] for line in found["kernels"][0]["lines"]]
    assert outcomes == ["optimized", "EILSEQ", "EINVAL", "optimized"]


def test_its_own_kprobes_record_nothing(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` warns that this kernel's own kprobes record nothing.

    For a refused place, `explain` names an accepted one.
    """
    file = tmp_path / "x.probes"
    file.write_text("p:a vfs_read+8\n")
    for kprobes, rules in (("kprobefs", []), ("kernel", ["no-records"])):
        words = ["check", str(file), "--image", str(image), "--kprobes", kprobes, "--json"]
        assert main(words) == 0
        (found,) = json.loads(capsys.readouterr().out)
        (line,) = found["kernels"][0]["lines"]
        assert [finding["rule"] for finding in line["findings"]] == rules
    assert main(["explain", "--image", str(image), "--kprobes", "kernel", "vfs_read"]) == 0
    assert "accepted after:  vfs_read+0x8  c.addi16sp" in capsys.readouterr().out


def test_its_own_kprobes_are_accepted_where_ftrace_patches(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel accepts a probe on the second instruction, which ftrace patches.

    `check` and `explain` report this.
    """
    file = tmp_path / "x.probes"
    file.write_text("p:a vfs_read+4\np:b vfs_read+8\n")
    for kprobes, warned in (("kprobefs", 0), ("kernel", 1)):
        words = ["check", str(file), "--image", str(image), "--kprobes", kprobes, "--json"]
        assert main(words) == 0
        (found,) = json.loads(capsys.readouterr().out)
        rules = [[each["rule"] for each in line["findings"]] for line in found["kernels"][0]["lines"]]
        assert [each.count("patched-by-ftrace") for each in rules] == [warned, 0]
    words = ["explain", "--image", str(image), "--kprobes", "kernel", "--json", "vfs_read+4", "vfs_read+8"]
    assert main(words) == 0
    assert [each["patched_by_ftrace"] for each in json.loads(capsys.readouterr().out)] == [True, False]


def test_its_own_tracefs_has_no_histograms(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` refuses histograms for the kernel's own tracefs, which Debian builds without them.

    kprobefs's tracefs over this kernel has histograms.
    """
    file = tmp_path / "x.probes"
    names = "hist:keys=common_pid", "traceoff"
    file.write_text("".join(f"events/sched/sched_switch/trigger = {name}\n" for name in names))
    for kprobes, expected in (("kprobefs", "unchecked"), ("kernel", "EINVAL")):
        main(["check", str(file), "--image", str(image), "--kprobes", kprobes, "--json"])
        (found,) = json.loads(capsys.readouterr().out)
        outcomes = [line["outcome"] for line in found["kernels"][0]["lines"]]
        assert outcomes == [expected, "unchecked"]


def test_explain(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--image", str(image), "vfs_read+8"]) == 0
    text = capsys.readouterr().out
    assert "vfs_read+0x8: optimized" in text
    assert "c.addi16sp sp, -0xa0" in text
    assert "buf (char *): buf=%a1:x64" in text


# Forms of the kernel's file


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
