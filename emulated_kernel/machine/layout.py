"""Where things lie in the guest's virtual address space (x86_64, the places Linux uses)."""

from __future__ import annotations

USER_BUFFERS = 0x00007F0000000000
USER_BUFFERS_SIZE = 8 << 20
"""Bounce buffers that stand for user memory (readable, writable, user)."""
DIRECT_MAP = 0xFFFF888000000000
"""All RAM; what the image maps read-only is read-only here too."""
HOST_STACKS = 0xFFFFC90000000000
"""Stacks for functions called by the host, with unmapped pages between."""
KERNEL_MAP = 0xFFFFFFFF80000000
"""Physical 0 as the image is linked: address - KERNEL_MAP is where a segment is loaded."""
TEXT_SPACE = 0xFFFFFFFFA0000000
TEXT_SPACE_SIZE = 64 << 20
"""Insn slots, detour buffers, module text: within +-2 GiB of the image."""
HOST_TEXT = 0xFFFFFFFFBF000000
"""The machine's own code page: return pad and self-test."""
