"""Where things lie in a guest's virtual address space; each architecture has one of these."""

from __future__ import annotations

from emulated_kernel.util.fast_dataclass import dataclass

USER_BUFFERS_SIZE = 8 << 20
TEXT_SPACE_SIZE = 64 << 20
MODULE_SPACE_SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """First addresses."""

    user_buffers: int
    """Bounce buffers that stand for user memory (readable, writable, user)."""
    direct_map: int
    """All RAM; what the image maps read-only is read-only here too."""
    direct_map_size: int
    """Bytes of RAM that fit."""
    host_stacks: int
    """Stacks for functions called by the host, with unmapped pages between."""
    kernel_map: int
    """Physical 0 as the image is linked: address - kernel_map is where a segment is loaded."""
    text_space: int
    """Insn slots and detour buffers: where a jump from the image reaches."""
    module_space: int
    """Modules' text and data: within reach of the image too."""
    host_text: int
    """The machine's own code page: return pad and self-test."""
    record_pages: int
    """Pages of ring buffers; the host's memory is only taken for those that were written."""
    record_pages_size: int
    """Bytes."""
