"""If the rules allow a jump over a region, no branch, call or pointer of the kernel leads into the region
past its first byte.

Each case tests a third of the functions; the cases of an architecture test different ones. KPROBEFS_WHOLE=1
takes all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import pytest
from iced_x86 import Decoder, FlowControl

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.image.builtin_image import KernelImage, prebuilt_dependencies
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.optimizer.djprobe import Djprobes
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.config import MachineConfig
from tests.sample import fewer, share

DIRECT = (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CALL)


def code(live: LiveImage[KernelImage]) -> Iterator[tuple[int, bytes]]:
    """Yield the address and the code of each symbol."""
    symbols = [*live.core.kallsyms.symbols, *(s for m in live._modules.values() for s in m.symbols)]
    for address in sorted({symbol.address for symbol in symbols}):
        where = live.kallsyms.lookup(address)
        parts = [range(*part) for part in live.text_ranges if address in range(*part)]
        if where is not None and parts:
            yield address, live.read(address, min(where.symbol.size, parts[0].stop - address))


def branches(live: LiveImage[KernelImage], bits: int) -> Iterator[tuple[int, str]]:
    """Yield the target of each call, and of each direct branch that leaves its symbol, with a description."""
    for address, body in code(live):
        for insn in Decoder(bits, body, ip=address):
            target = insn.near_branch_target
            leaves = not address <= target < address + len(body)
            if insn.flow_control in DIRECT and target and (leaves or insn.is_call_near):
                yield target, f"{insn.ip:#x}: {insn}"


def words(live: LiveImage[KernelImage], size: int) -> Iterator[tuple[int, str]]:
    """Yield each word of memory that is not executable, with a description of its place.

    Any of these words may be an address, for example in a jump table.
    """
    for segment in live.core.segments:
        if segment.prot & Prot.EXEC:
            continue
        for offset in range(0, len(segment.data) - size + 1, 4):
            word = int.from_bytes(segment.data[offset : offset + size], "little")
            yield word, f"the word at {segment.va + offset:#x}"


JUMP_SIZE = 5
CASES = (
    ("x86_64", "linux-6.1"),
    ("x86_64", "optprobes-2009"),
    ("i386", "linux-6.1"),
    ("i386", "optprobes-2009"),
    ("i386", "djprobe-2007"),
)
PARTS = 3


@pytest.mark.parametrize(("arch", "profile"), CASES)
def test_nothing_leads_into_a_region(arch: str, profile: str) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        for module in prebuilt_dependencies(arch):
            if module != "initfail" and (PROFILES[profile].jprobes or module != "jprobe_example"):
                kernel.load_module(module)
        live, bits = kernel.live, kernel.arch.bits
        ways = [*branches(live, bits), *words(live, bits // 8)]
        ways += [(entry.fixup, f"the fixup of {entry.insn:#x}") for entry in live.ex_table]
        ways += [(label.target, f"the jump label at {label.code:#x}") for label in live.jump_labels]
        ways.sort()
        targets = [target for target, _ in ways]
        is_djprobe = isinstance(kernel.kprobes.optimizer, Djprobes)
        regions, found = 0, []
        for start, body in share(list(code(live)), CASES.index((arch, profile)), PARTS):
            for address in kernel.arch.instruction_boundaries(body, start):
                region = kernel.kprobes.probe_checker.optimized_region(address)
                if isinstance(region, Region):
                    # Jumps may lead to the end of a djprobe's region, whose bytes stay unchanged.
                    length = min(region.length, JUMP_SIZE) if is_djprobe else region.length
                    regions += 1
                    inside = slice(bisect_left(targets, address + 1), bisect_left(targets, address + length))
                    found += [f"{hex(address)}+{length}: {what}" for _, what in ways[inside]]
        assert found == []
        assert regions > fewer(10_000, PARTS)


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_branches_of_cold_parts_and_neighbours_are_told(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        verdict, image = kernel.kprobes.probe_checker, kernel.image
        awaited = {"show_opcodes", "layout_sections.cold"}
        for start, body in code(kernel.live):
            for address in kernel.arch.instruction_boundaries(body, start):
                found = verdict.optimized_region(address)
                if isinstance(found, Rejection) and found.reason is RejectReason.FOREIGN_BRANCH:
                    where = image.kallsyms.lookup(found.addr)
                    assert where is not None
                    awaited.discard(where.symbol.name)
            if not awaited:
                break
        assert awaited == set()
