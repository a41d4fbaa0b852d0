"""MemoryLayout: the map of a guest's virtual address space, one for each architecture."""

from __future__ import annotations

from emulated_kernel.util.fast_dataclass import dataclass

USER_BUFFERS_SIZE = 8 << 20
TEXT_SPACE_SIZE = 64 << 20
MODULE_SPACE_SIZE = 16 << 20
PUN_SPACES = {
    64: (
        range(0xFFFFFFFF01000000, 0xFFFFFFFF60000000),
        range(0xFFFFFFFF61000000, 0xFFFFFFFF70000000),
        range(0xFFFFFFFF71000000, 0xFFFFFFFF80000000),
        range(0xFFFFFFFF88000000, 0xFFFFFFFFA0000000),
        range(0xFFFFFFFFA4000000, 0xFFFFFFFFBF000000),
        range(0xFFFFFFFFC9000000, 0xFFFFFFFFFF000000),
    ),
    32: (range(0xF5000000, 0xF8000000),),
}
"""Word size in bits -> x86 address ranges that the kernel leaves unused, for detours of punned jumps.

A punned jump (see arch/x86/punned.py) cannot choose all bytes of its displacement. From each range, 32-bit
displacements reach the kernel's text and the other code of the host. The gaps between the ranges hold pages
of the host.
"""


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """First address of each region of the guest's address space; fields with `_size` are in bytes."""

    user_buffers: int
    """Bounce buffers that serve as user memory, readable and writable in user mode."""
    direct_map: int
    """Direct map of all RAM; read-only parts of the image are read-only in the direct map too."""
    direct_map_size: int
    """Largest RAM size that the direct map can hold."""
    host_stacks: int
    """Stacks for functions that the host calls, separated by unmapped pages."""
    kernel_map: int
    """Base of the image's mapping: a segment that is linked at `kernel_map` + N is at physical address N."""
    text_space: int
    """Insn slots and detour buffers, within the reach of a jump from the image."""
    module_space: int
    """Text and data of modules, within the reach of a jump from the image."""
    host_text: int
    """Page of the host's code: the halt to which called functions return, and the code of the self-test."""
    record_pages: int
    """Pages of ring buffers; host memory is only used for pages that were written."""
    record_pages_size: int
    """Size in bytes of the region for pages of ring buffers."""
    pun_space: tuple[range, ...] = ()
    """Address ranges for the detours of punned jumps (see PUN_SPACES); empty on RISC-V and arm64."""
