"""Command lines of the kernels, by processor. The name of a snapshot depends on them."""

from __future__ import annotations

from typing import Final

from emulated_kernel.guests.linux.pc.devices import TSC_KHZ
from emulated_kernel.guests.linux.pc.gic_board import CONSOLE

X86_COMMAND_LINE: Final = (
    f"console=ttyS0 quiet nokaslr acpi=off nolapic noapic nosmp tsc_early_khz={TSC_KHZ} tsc=reliable "
    "no_timer_check panic=-1 cryptomgr.notests initcall_blacklist=jent_mod_init randomize_kstack_offset=off"
)
"""Command line of an x86-64 kernel.

It disables the self-tests of crypto algorithms, which take a tenth of a boot, and jent_mod_init, which
measures the jitter of a real CPU's time. It also disables random stack offsets, which would slow down each
system call.
"""
ARM64_COMMAND_LINE: Final = (
    f"earlycon=pl011,{CONSOLE:#x} keep_bootcon quiet nokaslr panic=-1 cma=0 cryptomgr.notests "
    "initcall_blacklist=jent_mod_init randomize_kstack_offset=off"
)
"""Command line of an arm64 kernel.

It disables the self-tests of crypto algorithms, which take most of a boot, and jent_mod_init, which measures
the jitter of a real CPU's time. It also disables the reservation of memory for devices (cma), and random
stack offsets.
"""
RISCV_COMMAND_LINE: Final = (
    "earlycon=sbi keep_bootcon quiet nokaslr no4lvl panic=-1 cryptomgr.notests "
    "initcall_blacklist=check_unaligned_access_all_cpus,jent_mod_init randomize_kstack_offset=off"
)
"""Command line of a riscv64 kernel.

`no4lvl` selects Sv39. The line disables the self-tests of crypto algorithms, which take most of a boot. It
also disables two functions that measure a real CPU's time, and random stack offsets.
"""
