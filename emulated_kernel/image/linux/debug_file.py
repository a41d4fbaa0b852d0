"""Makes files with debug information, for the built-in kernels and for distributions' kernels.

The files are for debuggers. The types come from BTF. Distributions ship DWARF only in packages of several
hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.debug_elf import NOTES_SECTION, MemorySection, NamedAddress, build_id, debug_elf
from emulated_kernel.image.elf import SHF_ALLOC, SHF_EXECINSTR, SHF_WRITE
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.btf_dwarf import debug_sections, empty_sections
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.types_file import load_types
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.config import ELF_MACHINES
from emulated_kernel.util.errors import KernelError

VARIABLES = MappingProxyType({
    "init_task": "struct task_struct",
    "init_pid_ns": "struct pid_namespace",
    "init_uts_ns": "struct uts_namespace",
    "init_nsproxy": "struct nsproxy",
    "init_mm": "struct mm_struct",
    "init_net": "struct net",
    "init_css_set": "struct css_set",
    "net_namespace_list": "struct list_head",
    "modules": "struct list_head",
    "super_blocks": "struct list_head",
    "slab_caches": "struct list_head",
    "vmap_area_list": "struct list_head",
    "iomem_resource": "struct resource",
    "vmemmap_base": "long unsigned int",
    "page_offset_base": "long unsigned int",
    "vmalloc_base": "long unsigned int",
    "jiffies": "long unsigned int",
    "jiffies_64": "u64",
    "phys_base": "long unsigned int",
    "saved_command_line": "char *",
    "linux_banner": "char []",
    "__per_cpu_offset": "long unsigned int []",
    "__cpu_online_mask": "struct cpumask",
    "__cpu_possible_mask": "struct cpumask",
    "__cpu_present_mask": "struct cpumask",
    "nr_cpu_ids": "unsigned int",
    "max_pfn": "long unsigned int",
    "host_return_trampoline": "long unsigned int",
    "host_native_return_trampoline": "long unsigned int",
})  # fmt: skip
"""Global variable -> its type in C (v6.1). BTF has no variables except per-CPU ones.

The last two are variables of kprobefs's own kernel.
"""


def builtin_debug_file(image: KernelImage) -> bytes:
    """Return an ELF file of a built-in kernel's image, with its memory, its symbols and its types.

    Raises: KernelError ENOEXEC (damaged types).
    """
    types = load_types(image.path)
    word_size = image.bits // 8
    # drgn uses no file without debug sections, not even its symbols.
    debug = empty_sections(word_size) if types is None else _debug(types, word_size, image.kallsyms.symbols)
    memory = (
        MemorySection(
            _section_name(number, segment.prot),
            segment.va,
            _flags(segment.prot),
            segment.data,
            segment.mem_size,
        )
        for number, segment in enumerate(image.segments)
    )
    machine = ELF_MACHINES[image.arch]
    symbols = _named(image.kallsyms.symbols)
    return debug_elf(machine, image.bits, memory, symbols, debug, build_id(image))


def linux_debug_file(kernel: LinuxKernel) -> bytes:
    """Return an ELF file of a distribution's kernel, with its memory before boot, its symbols and its types.

    Raises: KernelError ENODATA (no BTF), ENOEXEC (damaged BTF).
    """
    symbols = kernel.kallsyms.symbols
    debug = _debug(kernel.btf, 8, symbols)
    memory = list(_linux_memory(kernel))
    # The flat images of arm64 and RISC-V have their notes in the middle of data, without a section.
    has_notes = any(section.name == NOTES_SECTION for section in memory)
    identity = b"" if has_notes else bytes.fromhex(kernel.build_id)
    machine = ELF_MACHINES[kernel.architecture]
    return debug_elf(machine, 64, memory, _named(symbols), debug, identity)


def _linux_memory(kernel: LinuxKernel) -> Iterator[MemorySection]:
    """Yield the sections of the kernel's file; the file's segments if it has no sections."""
    vmlinux = kernel.vmlinux
    for name, section in vmlinux.sections.items():
        data: bytes | memoryview = b""
        if section.in_file:
            try:
                data = vmlinux.section_bytes(name)[1]
            except KernelError:
                continue
        yield MemorySection(name, section.address, section.flags | SHF_ALLOC, data, section.size)
    if not vmlinux.sections:
        for number, segment in enumerate(vmlinux.segments):
            prot = (
                Prot(0) | (Prot.WRITE if segment.flags & 2 else 0) | (Prot.EXEC if segment.flags & 1 else 0)
            )
            name = _section_name(number, Prot(prot))
            yield MemorySection(name, segment.va, _flags(Prot(prot)), segment.data, segment.mem_size)


def _section_name(number: int, prot: Prot) -> str:
    kind = ".text" if prot & Prot.EXEC else ".data" if prot & Prot.WRITE else ".rodata"
    return kind if number < 3 else f"{kind}.{number}"


def _flags(prot: Prot) -> int:
    return SHF_ALLOC | (SHF_WRITE if prot & Prot.WRITE else 0) | (SHF_EXECINSTR if prot & Prot.EXEC else 0)


def _debug(btf: Btf, word_size: int, symbols: Iterable[Symbol]) -> dict[str, bytes]:
    places: dict[str, tuple[int, int]] = {}
    several: set[str] = set()
    for symbol in symbols:
        if symbol.name in places:
            several.add(symbol.name)
        places[symbol.name] = symbol.address, symbol.size
    # BTF does not say to which of several functions of one name a prototype belongs.
    unique = {name: place for name, place in places.items() if name not in several}
    return debug_sections(btf, word_size, unique, VARIABLES)


def _named(symbols: Iterable[Symbol]) -> list[NamedAddress]:
    return [NamedAddress(each.name, each.address, each.size, each.type) for each in symbols]
