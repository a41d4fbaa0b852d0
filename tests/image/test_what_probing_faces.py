"""Each image contains the kinds of code that make probing difficult, as compilers and real kernels produce
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import capstone
import pytest

from emulated_kernel.image.builtin_image import PREBUILT, KernelImage, load_image
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from tests.image.guest import BUGFLAG_WARNING

X86 = ("x86_64", "i386")
RETPOLINE = PREBUILT / "x86_64-retpoline" / "vmlinux"
IBT = PREBUILT / "x86_64-ibt" / "vmlinux"
_MODES = {
    "x86_64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
    "i386": (capstone.CS_ARCH_X86, capstone.CS_MODE_32),
    "riscv64": (capstone.CS_ARCH_RISCV, capstone.CS_MODE_RISCV64 | capstone.CS_MODE_RISCVC),
    "riscv64i": (capstone.CS_ARCH_RISCV, capstone.CS_MODE_RISCV64),
}


def functions(image: KernelImage) -> list[Symbol]:
    (text,) = image.text_ranges
    return [s for s in image.kallsyms.symbols if s.is_text and s.size and s.address + s.size <= text.end]


def names(image: KernelImage) -> set[str]:
    return {symbol.name for symbol in functions(image)}


@cache
def disassembled(image_path: str, arch: str) -> list[tuple[str, int, str, str]]:
    """Return the function, address, mnemonic and operands of all instructions."""
    image = load_image(image_path, arch)
    disassembler = capstone.Cs(*_MODES[arch])
    return [
        (symbol.name, insn[0], insn[2], insn[3])
        for symbol in functions(image)
        for insn in disassembler.disasm_lite(image.read(symbol.address, symbol.size), symbol.address)
    ]


def instructions(image: KernelImage) -> list[tuple[str, int, str, str]]:
    return disassembled(str(image.path), image.arch)


@pytest.mark.parametrize("kind", ["part", "isra", "constprop"])
def test_pieces_and_variants_of_functions(each_image: KernelImage, kind: str) -> None:
    assert [name for name in names(each_image) if f".{kind}." in name]


@pytest.mark.parametrize("arch", X86)
def test_cold_pieces(arch: str) -> None:
    """Functions of the x86 images have split-off cold parts, which gcc makes only on x86."""
    assert len([name for name in names(load_image(arch=arch)) if name.endswith(".cold")]) > 5


def test_duplicate_static_symbols_and_aliases(each_image: KernelImage) -> None:
    every = [symbol.name for symbol in functions(each_image)]
    assert each_image.kallsyms.count_name("name_show") == 2
    assert len(every) - len(set(every)) >= 3
    addresses = [symbol.address for symbol in functions(each_image)]
    assert len(addresses) > len(set(addresses))


def test_places_that_trap(each_image: KernelImage) -> None:
    assert {bug.flags & BUGFLAG_WARNING for bug in each_image.bugs.values()} == {0, BUGFLAG_WARNING}
    assert len(each_image.ex_table) > 5
    assert each_image.jump_labels


def test_functions_with_and_without_an_entry_site(each_image: KernelImage) -> None:
    with_site = {str(each_image.kallsyms.lookup(site)).partition("+")[0] for site in each_image.mcount}
    assert {"vfs_read", "tcp_v4_rcv", "pipe_read", "schedule"} <= with_site
    without = names(each_image) - with_site
    assert {"sched_clock", "__switch_to", "memcpy"} <= without


def test_functions_that_may_not_be_probed(each_image: KernelImage) -> None:
    assert len(each_image.blacklist) > 20


def jump_targets(image: KernelImage) -> Iterator[tuple[str, int]]:
    """Yield (name of the function, target) for each direct jump."""
    for name, _, mnemonic, operands in instructions(image):
        if mnemonic in ("jmp", "j", "jal", "c.j") and operands.removeprefix("zero, ").startswith("0x"):
            yield name, int(operands.removeprefix("zero, "), 16)


@pytest.mark.parametrize("arch", X86)
def test_tail_calls(arch: str) -> None:
    """The image has tail calls: jumps to the beginning of another function."""
    image = load_image(arch=arch)
    starts = {symbol.address: symbol.name for symbol in functions(image)}
    tails = {(name, starts[to]) for name, to in jump_targets(image) if starts.get(to, name) != name}
    assert ("ksys_lseek", "vfs_llseek") in tails or len(tails) > 50


@pytest.mark.parametrize("arch", X86)
def test_jump_tables(arch: str) -> None:
    """The image has jumps whose target is read from a table in read-only data."""
    image = load_image(arch=arch)
    jumps = [operands for _, _, mnemonic, operands in instructions(image) if mnemonic == "jmp"]
    assert len([operands for operands in jumps if "*" in operands]) >= 3


def test_jumps_by_register(each_image: KernelImage) -> None:
    mnemonics = {mnemonic for _, _, mnemonic, operands in instructions(each_image) if "0x" not in operands}
    assert mnemonics & {"jmp", "jr", "c.jr", "jalr"}


@pytest.mark.parametrize("arch", X86)
def test_padding_between_functions_is_nops_or_breakpoints(arch: str) -> None:
    image = load_image(arch=arch)
    ends = [symbol.address + symbol.size for symbol in functions(image)]
    (text,) = image.text_ranges
    behind = {image.read(end, 1) for end in ends if end < text.end}
    assert b"\xcc" in behind


def test_the_retpoline_build_has_no_indirect_jump_in_c_code() -> None:
    image = load_image(RETPOLINE, "x86_64")
    indirect = {
        name
        for name, _, mnemonic, operands in instructions(image)
        if mnemonic in ("jmp", "call") and not operands.startswith("0x")
    }
    first, last = (image.kallsyms.lookup_name(f"__indirect_thunk_{end}") for end in ("start", "end"))
    assert first is not None
    assert last is not None
    assert indirect <= {"ret_from_fork", "call_on_irq_stack", "asm_host_interrupt"}
    thunks = [to for _, to in jump_targets(image) if first <= to < last]
    assert len(thunks) > 20


def test_the_retpoline_build_runs() -> None:
    with Kernel(MachineConfig(image=RETPOLINE)) as kernel, Kernel() as plain:
        for load in ("load_tcp", "load_pipe", "load_files", "load_fork"):
            assert kernel.call(load, 5) == plain.call(load, 5) > 0


def test_the_ibt_build_has_landing_pads_and_no_jump_tables() -> None:
    image = load_image(IBT, "x86_64")
    first = {name: mnemonic for name, _, mnemonic, _ in reversed(instructions(image))}
    assert first["vfs_read"] == first["tcp_v4_rcv"] == "endbr64"
    assert sum(mnemonic == "endbr64" for mnemonic in first.values()) > 500
    jumps = [operands for _, _, mnemonic, operands in instructions(image) if mnemonic == "jmp"]
    assert not [operands for operands in jumps if "*8" in operands]


def test_probes_on_entries_of_the_ibt_build_are_after_the_landing_pads() -> None:
    """A probe at a symbol and a probe at the address after its landing pad are at one place, which is an
    fentry site.
    """
    with Kernel(MachineConfig(image=IBT, profile="linux-6.12")) as kernel, Kernel() as plain:
        for load in ("load_tcp", "load_pipe", "load_files", "load_fork"):
            assert kernel.call(load, 5) == plain.call(load, 5) > 0
        definitions = ("p:a gcd $arg*", "p:b gcd+4 a b", "r:c gcd $retval a", "f:d gcd b")
        kernel.write_file("tracing/dynamic_events", "\n".join(definitions))
        for group in ("kprobes", "fprobes"):
            kernel.write_file(f"tracing/events/{group}/enable", "1")
        address = kernel.kallsyms_lookup_name("gcd") + 4
        listed = kernel.read_file("kprobes/list").splitlines()
        assert [line.split()[0] for line in listed] == [f"{address:x}"] * 3
        assert all(line.endswith("gcd+0x4    [FTRACE]") for line in listed)
        assert kernel.call("gcd", 75, 100) == 25
        lines = [line for line in kernel.read_file("tracing/trace").splitlines() if line[:1] != "#"]
        records = [line.partition(": ")[2] for line in lines]
        assert sorted(records[:3]) == [
            "a: (gcd+0x4/0x80) a=75 b=100",
            "b: (gcd+0x4/0x80) a=75 b=100",
            "d: (gcd+0x4/0x80) b=100",
        ]
        assert records[3].startswith("c: ")
        assert records[3].endswith("<- gcd) arg1=25 a=75")
