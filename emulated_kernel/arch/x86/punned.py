"""Punned jumps on x86: the last bytes of the jump are bytes of the code after the replaced instructions.

Code elsewhere may jump to the instruction after the replaced ones, so the bytes of this instruction keep
their values. These kept bytes are the upper bytes of the jump's displacement, so the detour can be at few
addresses only.
Source: "Binary Rewriting without Control Flow Recovery" (PLDI 2020), tactic T1.
"""

from __future__ import annotations

from errno import ERANGE

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.x86.copy_insn import DISP32_SIZE, JMP32_SIZE, relative_jump
from emulated_kernel.arch.x86.detour import MAX_DETOUR, relocated
from emulated_kernel.machine.memory_layout import PUN_SPACES
from emulated_kernel.util.errors import KernelError


def targets(region: Region) -> range:
    """Return the addresses to which the region's jump can lead without a change of its kept bytes."""
    kept = region.code[len(region.code) - region.kept :]
    free = DISP32_SIZE - region.kept
    lowest = region.addr + JMP32_SIZE + int.from_bytes(bytes(free) + kept, "little", signed=True)
    return range(lowest, lowest + (1 << 8 * free))


def punned_jump(region: Region, target: int) -> bytes:
    """Encode the region's jump to `target`. Raises: KernelError ERANGE (the kept bytes would change)."""
    if target not in targets(region):
        raise KernelError(ERANGE, f"no jump from {region.addr:#x} to {target:#x} keeps {region.kept} bytes")
    return relative_jump(region.addr, target)


def has_room(region: Region, bits: int) -> bool:
    """Return True if the region's jump can lead to a detour in unused address space.

    Return False if the jump reaches no unused addresses, or if a detour at the reached addresses could not
    reach the targets of its own branches and memory operands.
    """
    reached = targets(region)
    found = False
    for space in PUN_SPACES[bits]:
        first = max(reached.start, space.start)
        last = min(reached.stop - 1, space.stop - MAX_DETOUR)
        if first > last:
            continue
        found = True
        try:
            relocated(region, first, bits)
            relocated(region, last + MAX_DETOUR, bits)
        except KernelError:
            return False
    return found
