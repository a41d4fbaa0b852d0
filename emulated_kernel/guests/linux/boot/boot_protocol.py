"""Boot protocol of x86-64: loads a kernel into RAM. Also boots a kernel of any processor until init waits.

Source: Documentation/x86/boot.rst and zero-page.rst, the 64-bit boot protocol.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from itertools import count

from emulated_kernel.guests.linux.boot.command_lines import X86_COMMAND_LINE
from emulated_kernel.guests.linux.initramfs import initramfs
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import LinkedMemory
from emulated_kernel.machine.memory.paging import LARGE_PAGE_SIZE
from emulated_kernel.machine.traps.trap import GuestFault

HOST_SIZE = 64 << 20
"""Size in bytes of the host's area at the end of RAM. It is not in the guest's memory map."""
RAM_SIZE = (128 << 20) + HOST_SIZE
_LONGEST_LINE = 2048
"""Size in bytes of the kernel's buffer for the command line.

Mirrors: arch/x86/include/asm/setup.h:COMMAND_LINE_SIZE (v6.1).
"""
_STACK = 0x60000
_PARAMETERS = 0x10000
_COMMAND_LINE = 0x20000
_SETUP_DATA = 0x30000
_SETUP_RNG_SEED = 9
"""Type of the setup data that contains random bytes.

Mirrors: arch/x86/include/uapi/asm/bootparam.h:SETUP_RNG_SEED (v6.1).
"""
_TABLES = 0x70000
_GDT = 0x73000
_GDT_ENTRIES = struct.pack("<4Q", 0, 0, 0x00AF9B000000FFFF, 0x00CF93000000FFFF)
_LOW_RAM = 0x9FC00
_HIGH_RAM = 0x100000
_RAM = 1
_RESERVED = 2
_UNKNOWN_LOADER = 0xFF
_LOADED_HIGH = 1
_PROTOCOL = 0x20F
_CLEARS_BSS = ("clear_bss", "x86_64_start_kernel")
"""Names of the kernel functions that may clear the section .bss (5 to 10 MB) by a repeated store of bytes.

Usually clear_bss() clears it. If the compiler has inlined clear_bss(), x86_64_start_kernel() contains the
store.
"""
_REP_STOSB = b"\xf3\xaa"


def load(
    machine: PcMachine, vmlinux: LinkedMemory, parameters: Sequence[str] = (), random_seed: bytes = b""
) -> None:
    """Load the kernel, the initramfs and the boot parameters, and point the CPU to the kernel's entry.

    `parameters`: further parameters for the command line. `random_seed`: bytes that initialize the kernel's
    random number generator; b"" passes no seed. The kernel trusts only a seed of at least 32 bytes.
    Raises: KernelError ENOEXEC (a segment does not fit into RAM).
    """
    ram = machine.memory.ram
    top = len(ram) - HOST_SIZE
    files = initramfs(machine.abi.stub)
    initrd = (top - (1 << 20) - len(files)) & -4096
    for segment in vmlinux.segments:
        if segment.pa < _HIGH_RAM or segment.pa + segment.mem_size > initrd:
            raise unusable(
                f"a segment at physical {segment.pa:#x} is outside of the {len(ram) >> 20} MiB of RAM"
            )
        ram[segment.pa : segment.pa + len(segment.data)] = segment.data
    ram[initrd : initrd + len(files)] = files
    line = " ".join((X86_COMMAND_LINE, *parameters)).encode()[: _LONGEST_LINE - 1] + b"\0"
    ram[_COMMAND_LINE : _COMMAND_LINE + len(line)] = line
    page = _boot_parameters(top, initrd, len(files))
    if random_seed:
        data = struct.pack("<QII", 0, _SETUP_RNG_SEED, len(random_seed)) + random_seed
        ram[_SETUP_DATA : _SETUP_DATA + len(data)] = data
        struct.pack_into("<Q", page, 0x250, _SETUP_DATA)
    ram[_PARAMETERS : _PARAMETERS + 4096] = bytes(page)
    struct.pack_into("<Q", ram, _TABLES, _TABLES + 0x1000 | 3)
    struct.pack_into("<Q", ram, _TABLES + 0x1000, _TABLES + 0x2000 | 3)
    pages = (LARGE_PAGE_SIZE * number | 0x83 for number in range(512))
    struct.pack_into("<512Q", ram, _TABLES + 0x2000, *pages)
    ram[_GDT : _GDT + len(_GDT_ENTRIES)] = _GDT_ENTRIES
    machine.cpu.power_on(vmlinux.entry, _STACK, _TABLES, (_GDT, len(_GDT_ENTRIES)))
    machine.regs.si = _PARAMETERS


def _boot_parameters(top: int, initrd: int, initrd_size: int) -> bytearray:
    page = bytearray(4096)
    memory = (
        (0, _LOW_RAM, _RAM),
        (_LOW_RAM, 0x400, _RESERVED),
        (0xF0000, 0x10000, _RESERVED),
        (_HIGH_RAM, top - _HIGH_RAM, _RAM),
    )
    page[0x1E8] = len(memory)
    for number, area in enumerate(memory):
        struct.pack_into("<QQI", page, 0x2D0 + 20 * number, *area)
    struct.pack_into("<H2x4sH", page, 0x1FE, 0xAA55, b"HdrS", _PROTOCOL)
    page[0x210] = _UNKNOWN_LOADER
    page[0x211] = _LOADED_HIGH
    struct.pack_into("<II", page, 0x218, initrd, initrd_size)
    struct.pack_into("<I", page, 0x228, _COMMAND_LINE)
    return page


def _clear_bss_in_host(machine: PcMachine, kernel: LinuxKernel) -> None:
    """Make the host clear .bss. The guest's own `rep stosb` would take a tenth of the boot time."""
    for name in _CLEARS_BSS:
        address = kernel.kallsyms.lookup_name(name)
        found = kernel.kallsyms.lookup(address) if address else None
        if found is not None:
            start = found.symbol.address
            # A match that is part of another instruction does no harm, because the CPU never comes there.
            for match in re.finditer(_REP_STOSB, kernel.read(start, found.symbol.size)):
                machine.store_in_host(start + match.start())


def _protect_data(machine: PcMachine, kernel: LinuxKernel) -> None:
    """Make the kernel's data not executable when start_kernel() begins.

    The kernel itself does this at the end of its boot, so the page tables of the booted kernel do not differ.
    Unicorn looks for translated code at each store to an executable page. The kernel's first stack is in its
    data, so these lookups would take a quarter of the boot.
    Mirrors: arch/x86/mm/init_64.c:mark_rodata_ro (v6.1).
    """
    start = kernel.kallsyms.lookup_name("start_kernel")
    data = range(*kernel.between("_sdata", "__init_begin"))

    def protect() -> None:
        machine.memory.forbid_execution(machine.cpu.root, data)
        machine.engine.flush_tlb()

    if start is not None:
        machine.call_at(start, protect)


def boot(machine: LinuxMachine, kernel: LinuxKernel, progress: Callable[[int, int], None]) -> None:
    """Run the kernel from its first instruction until init waits for the host's requests.

    init then runs its stub, the user-mode code in which a task waits. `progress` is called at each initcall.
    Its arguments are the number of initcalls that have begun, and the number of all initcalls.
    Raises: GuestFault (the guest has died; the message ends with the last line on the kernel's console).
    """
    calls = kernel.between("__initcall_start", "__initcall_end")
    total = (calls.end - calls.start) // 4
    begun = count(1)
    initcall = kernel.kallsyms.lookup_name("do_one_initcall")
    if isinstance(machine, PcMachine):
        _clear_bss_in_host(machine, kernel)
        _protect_data(machine, kernel)
    if initcall is not None:
        machine.call_at(initcall, lambda: progress(min(next(begun), total), total))
    try:
        machine.run_to_stub()
    except GuestFault as fault:
        said = machine.pc.console.decode("latin1").strip().splitlines()
        raise GuestFault(fault.trap, ": ".join([str(fault), *said[-1:]])) from None
