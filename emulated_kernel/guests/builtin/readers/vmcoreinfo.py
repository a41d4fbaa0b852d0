"""VMCOREINFO of kprobefs's own kernel: the data that a debugger needs to translate addresses."""

from __future__ import annotations

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.debug_elf import build_id
from emulated_kernel.machine.machine import Machine
from emulated_kernel.util.abi import PAGE_SIZE

_SYMBOLS = ("_stext", "init_task")


def vmcoreinfo(machine: Machine, image: KernelImage) -> bytes:
    """Return the text of the VMCOREINFO note.

    Linux: the kernel itself writes it. Deviates: the host writes it, because only the host knows the page
    tables.
    Mirrors: kernel/crash_core.c:crash_save_vmcoreinfo_init, arch/x86/kernel/machine_kexec_64.c,
    arch/riscv/kernel/crash_core.c (v6.1).
    """
    layout = machine.model.layout
    root = machine.memory.tables.root
    is_riscv = machine.model.name.startswith("riscv")
    lines = {
        "OSRELEASE": image.version.split()[2],
        "BUILD-ID": build_id(image).hex(),
        "PAGESIZE": str(PAGE_SIZE),
        "SYMBOL(swapper_pg_dir)": f"{layout.direct_map + root:x}",
        "KERNELOFFSET": "0",
    }
    if is_riscv:
        lines |= {
            "NUMBER(VA_BITS)": "39",
            "NUMBER(PAGE_OFFSET)": f"0x{layout.direct_map:x}",
            "NUMBER(phys_ram_base)": "0x0",
            "NUMBER(KERNEL_LINK_ADDR)": f"0x{layout.kernel_map:x}",
            "NUMBER(va_kernel_pa_offset)": f"0x{layout.kernel_map:x}",
        }
    else:
        lines |= {"NUMBER(phys_base)": "0", "NUMBER(pgtable_l5_enabled)": "0"}
    for name in _SYMBOLS:
        address = image.kallsyms.lookup_name(name)
        if address is not None:
            lines[f"SYMBOL({name})"] = f"{address:x}"
    return "".join(f"{name}={value}\n" for name, value in lines.items()).encode()
