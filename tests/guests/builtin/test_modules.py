"""Modules that the guest's own loader loads: their functions, refused files and the reasons, and memory that
is freed.
"""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.listed import list_lines
from tests.ledger import ledger_mismatches

DIRECTORY = PREBUILT / "x86_64" / "modules"
LOADED = ("ktgt", "twins", "counter_user", "trace_printk")
E_TYPE, E_MACHINE, E_SHOFF, E_SHNUM = 16, 18, 40, 60


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    """Yield the shared kernel.

    Afterwards, unload all modules, and assert that no module memory or patch is left.
    """
    yield shared
    for module in shared.modules.loaded():
        shared.unload_module(module.name)
    assert shared.machine.modules._pool.used == 0
    assert not ledger_mismatches(shared.machine.text)


def file_of(name: str) -> bytes:
    return (DIRECTORY / f"{name}.ko").read_bytes()


def last_message(kernel: Kernel) -> str:
    return kernel.guest.kernel.messages()[-1].text


def free_pages(kernel: Kernel) -> int:
    return kernel.call("nr_free_pages")


def refused(kernel: Kernel, data: bytes) -> tuple[int, str]:
    """Return the errno and the last line of the log for a module file that cannot be loaded."""
    used = kernel.machine.modules._pool.used
    with pytest.raises(KernelError) as failure:
        kernel.modules.init_module(data, "test")
    assert kernel.machine.modules._pool.used == used
    return failure.value.errno or 0, last_message(kernel)


def edited(data: bytes, offset: int, layout: str, value: int) -> bytes:
    new = bytearray(data)
    struct.pack_into(layout, new, offset, value)
    return bytes(new)


class TestLoading:
    def test_functions_can_be_called(self, kernel: Kernel) -> None:
        kernel.load_module("ktgt")
        assert kernel.call("ktgt_add", 3, 4) == 7
        assert kernel.call("ktgt:ktgt_str", "ab") == 195
        (info,) = kernel.modules.loaded()
        address = kernel.live.kallsyms.lookup_name("ktgt_np")
        assert info.line(zero_address=False) == f"ktgt 8192 0 - Live 0x{address:016x}\n"
        assert info.line(zero_address=True) == "ktgt 8192 0 - Live 0x0000000000000000\n"

    def test_text_cannot_be_written_by_the_guest(self, kernel: Kernel) -> None:
        kernel.load_module("ktgt")
        address = kernel.live.kallsyms.lookup_name("ktgt_add") or 0
        with pytest.raises(KernelError) as failure:
            kernel.call("memset", address, 0, 4)
        assert failure.value.errno == errno.EFAULT

    def test_what_it_uses_comes_first_and_goes_last(self, kernel: Kernel) -> None:
        kernel.load_module("counter-user")
        lines = [module.line(zero_address=True).split()[:4] for module in kernel.modules.loaded()]
        assert [line[0] for line in lines] == ["counter_user", "counter"]
        assert lines[1][2:] == ["1", "counter_user,"]
        assert kernel.call("counter_twice", 5) == 11
        with pytest.raises(KernelError) as failure:
            kernel.unload_module("counter")
        assert failure.value.errno == errno.EWOULDBLOCK
        assert last_message(kernel) == "counter: in use by counter_user"
        kernel.unload_module("counter_user")
        kernel.unload_module("counter")
        assert kernel.modules.loaded() == []

    def test_a_reference_keeps_it(self, kernel: Kernel) -> None:
        kernel.load_module("ktgt")
        module = kernel.live.kallsyms.lookup_name("ktgt:__this_module") or 0
        assert kernel.call("try_module_get", module) == 1
        with pytest.raises(KernelError) as failure:
            kernel.unload_module("ktgt")
        assert failure.value.errno == errno.EWOULDBLOCK
        assert last_message(kernel) == "ktgt: in use (1)"
        kernel.call("module_put", module)

    def test_one_that_is_there_already(self, kernel: Kernel) -> None:
        kernel.load_module("ktgt")
        kernel.load_module("ktgt")
        code, message = refused(kernel, file_of("ktgt"))
        assert (code, message) == (errno.EEXIST, "ktgt: is loaded already")
        assert len(kernel.modules.loaded()) == 1

    def test_an_init_that_fails(self, kernel: Kernel) -> None:
        with pytest.raises(KernelError) as failure:
            kernel.load_module("initfail")
        assert failure.value.errno == errno.ENODEV
        assert last_message(kernel) == "initfail: its init function returned -19"
        assert kernel.live.kallsyms.lookup_name("initfail_probe") is None

    def test_unknown_ones(self, kernel: Kernel) -> None:
        for action in (kernel.load_module, kernel.unload_module):
            with pytest.raises(KernelError) as failure:
                action("no_such")
            assert failure.value.errno == errno.ENOENT
            assert "no_such" in last_message(kernel)

    def test_a_warning_within_one(self, kernel: Kernel) -> None:
        kernel.load_module("ktgt")
        before = len(kernel.guest.kernel.messages())
        assert kernel.call("ktgt_warn", 11) & 0xFFFFFFFF == (1 << 32) - errno.EINVAL
        lines = [m.text for m in kernel.guest.kernel.messages()][before - 1 :]
        assert any("ktgt.c" in line and "ktgt_warn+0x10/" in line and "[ktgt]" in line for line in lines)

    def test_nothing_is_lost(self, kernel: Kernel) -> None:
        """The numbers of free guest pages and of used host pages do not change if modules are loaded and
        unloaded 20 times.
        """

        def round_trip() -> None:
            for name in LOADED:
                kernel.load_module(name)
            for name in (*LOADED, "counter"):
                kernel.unload_module(name)
            refused(kernel, file_of("ktgt")[:-100])

        round_trip()
        before = free_pages(kernel), kernel.machine.memory.host_pages.used
        for _ in range(20):
            round_trip()
        assert (free_pages(kernel), kernel.machine.memory.host_pages.used) == before

    def test_the_same_address_again(self, kernel: Kernel) -> None:
        kernel.load_module("ktgt")
        first = kernel.modules.loaded()[0].address
        kernel.unload_module("ktgt")
        kernel.load_module("ktgt")
        assert kernel.modules.loaded()[0].address == first


class TestBadFiles:
    """Files that are no valid modules are refused, the log says why, and no memory stays in use."""

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "module: 0 bytes are no ELF file"),
            (b"not an ELF file at all", "module: not an ELF file"),
            (b"\x7fELF", "module: truncated: the ELF header has 64 bytes, the file 4"),
        ],
    )
    def test_no_elf(self, data: bytes, message: str, kernel: Kernel) -> None:
        assert refused(kernel, data) == (errno.ENOEXEC, message)

    @pytest.mark.parametrize(
        ("offset", "layout", "value", "message"),
        [
            (4, "B", 1, "module: ELF class 1, data encoding 1: not of this machine"),
            (E_TYPE, "<H", 2, "module: ELF type 2 is not relocatable"),
            (E_MACHINE, "<H", 243, "module: ELF machine 243, not 62"),
            (E_SHNUM, "<H", 0, "module: no section headers"),
            (E_SHOFF, "<Q", 1 << 40, "module: truncated: section headers up to "),
        ],
    )
    def test_a_foreign_header(
        self, offset: int, layout: str, value: int, message: str, kernel: Kernel
    ) -> None:
        code, told = refused(kernel, edited(file_of("ktgt"), offset, layout, value))
        assert code == errno.ENOEXEC
        assert told.startswith(message)

    def test_a_kernel_is_no_module(self, kernel: Kernel) -> None:
        code, message = refused(kernel, (PREBUILT / "x86_64" / "vmlinux").read_bytes())
        assert (code, message) == (errno.ENOEXEC, "module: ELF type 2 is not relocatable")

    def test_cut_off_anywhere(self, kernel: Kernel) -> None:
        data = file_of("ktgt")
        for size in range(0, len(data), 97):
            code, message = refused(kernel, data[:size])
            assert code == errno.ENOEXEC
            assert message.startswith("module: ")

    def test_another_version_magic(self, kernel: Kernel) -> None:
        data = file_of("ktgt").replace(b"vermagic=6.1.0-kprobefs", b"vermagic=6.2.0-kprobefs")
        code, message = refused(kernel, data)
        assert code == errno.ENOEXEC
        assert message.startswith("ktgt: version magic '6.2.0-kprobefs preempt")

    def test_an_unresolved_symbol(self, kernel: Kernel) -> None:
        data = file_of("ktgt").replace(b"\0_printk\0", b"\0_prynta\0")
        assert refused(kernel, data) == (errno.ENOENT, "ktgt: Unknown symbol _prynta (err -2)")

    def test_what_it_uses_is_not_loaded(self, kernel: Kernel) -> None:
        code, message = refused(kernel, file_of("counter_user"))
        assert code == errno.ENOENT
        assert message.startswith("counter_user: Unknown symbol counter_")

    def test_a_symbol_that_another_one_exports(self, kernel: Kernel) -> None:
        kernel.load_module("counter")
        this_module = ElfFile(file_of("counter")).sections[".gnu.linkonce.this_module"].offset
        data = bytearray(file_of("counter"))
        name = data.index(b"counter\0", this_module)
        data[name : name + 1] = b"k"
        assert refused(kernel, bytes(data)) == (
            errno.ENOEXEC,
            "kounter: exports duplicate symbol counter_read",
        )

    def test_too_large(self, kernel: Kernel, tmp_path: Path) -> None:
        path = tmp_path / "large.ko"
        path.write_bytes(bytes(5 << 20))
        with pytest.raises(KernelError) as failure:
            kernel.load_module(str(path))
        assert failure.value.errno == errno.EFBIG
        assert last_message(kernel) == f"module {path}: more than 4194304 bytes"

    def test_no_file(self, kernel: Kernel) -> None:
        with pytest.raises(KernelError) as failure:
            kernel.load_module("/no/such/file.ko")
        assert failure.value.errno == errno.ENOENT
        assert last_message(kernel) == "module /no/such/file.ko: No such file or directory"


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files(seed: int) -> None:
    """A module with random bytes changed in its section headers is refused or loaded, and the guest
    lives on.
    """
    dice = random.Random(seed)
    data = file_of("twins")
    start = struct.unpack_from("<Q", data, E_SHOFF)[0]
    with Kernel() as kernel:
        for _ in range(80):
            new = bytearray(data)
            for _ in range(dice.randint(1, 3)):
                new[dice.randrange(start, len(new))] = dice.randrange(256)
            with suppress(KernelError):
                kernel.modules.init_module(bytes(new), "damaged")
                kernel.unload_module("twins")
        assert not kernel.guest.is_dead
        kernel.load_module("ktgt")
        assert kernel.call("ktgt_add", 1, 2) == 3


def test_in_any_order() -> None:
    """Code that was translated for one module never runs for another module at the same address."""
    dice = random.Random(1)
    with Kernel() as kernel:
        for step in range(100):
            name = dice.choice(LOADED)
            if any(module.name == name for module in kernel.modules.loaded()):
                kernel.unload_module(name)
            else:
                kernel.load_module(name)
            loaded = {module.name for module in kernel.modules.loaded()}
            if "ktgt" in loaded:
                assert kernel.call("ktgt_add", step, 1) == step + 1
            if "twins" in loaded:
                assert kernel.call("second_twin", step) == 3 * (step + 2)
            if "counter_user" in loaded:
                assert kernel.call("counter_twice", 0) == 1
        assert not ledger_mismatches(kernel.machine.text)


@pytest.mark.parametrize(("arch", "inside"), [("i386", 5), ("riscv64", 8), ("riscv64i", 8)])
def test_other_architectures(arch: str, inside: int) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        bits = kernel.image.bits
        kernel.load_module("ktgt")
        kernel.load_module("counter_user")
        hits: list[str] = []
        for symbol, offset in (("ktgt_add", 0), ("ktgt_str", inside), ("counter_twice", 0)):
            kernel.register_kprobe(
                Kprobe(
                    symbol_name=symbol, offset=offset, pre_handler=lambda k, _r: hits.append(k.symbol_name)
                )
            )
        assert kernel.call("ktgt_add", 3, 4) == 7
        assert kernel.call("ktgt_str", "ab") == 195
        assert kernel.call("ktgt_peek", 0) == (1 << bits) - 1
        assert kernel.call("counter_twice", 2) == 5
        assert hits == ["ktgt_add", "ktgt_str", "counter_twice"]
        address = kernel.live.kallsyms.lookup_name("ktgt:ktgt_np") or 0
        lines = [module.line(zero_address=False) for module in kernel.modules.loaded()]
        assert lines[-1] == f"ktgt 8192 0 - Live 0x{address:0{bits // 4}x}\n"
        for name in ("ktgt", "counter_user", "counter"):
            kernel.unload_module(name)
        assert all("[GONE]" in line for line in list_lines(kernel.kprobes))
        assert kernel.machine.modules._pool.used == 0


def test_paths_that_are_no_modules(kernel: Kernel, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(1 << 40)
    for path, number in (
        (str(pipe), errno.EINVAL),
        ("/dev/zero", errno.EINVAL),
        ("/", errno.EISDIR),
        (str(big), errno.EFBIG),
        ("/no\0such", errno.ENOENT),
        ("n" * 300, errno.ENOENT),
        (f"/{'n' * 300}", errno.ENAMETOOLONG),
    ):
        with pytest.raises(KernelError) as failure:
            kernel.load_module(path)
        assert failure.value.errno == number, path
