"""Listings of the host's code in the guest: the listed bytes are what keystone assembles from the listed
instructions.
"""

from __future__ import annotations

import re
from typing import Any, cast

import keystone
import pytest

from emulated_kernel.guests.linux import initramfs
from emulated_kernel.guests.linux.guest import breakpoint_stub, irq_work_wakeup, wakeup_thunk
from emulated_kernel.guests.linux.mounts import arm64_control_stubs, control_calls
from emulated_kernel.guests.linux.probing import arm64_calls, kernel_calls
from emulated_kernel.guests.linux.vmcore import vmcore_files
from emulated_kernel.util.code_listing import machine_code

LISTINGS = {
    "wakeup": wakeup_thunk.WAKEUP,
    "breakpoints": breakpoint_stub.STUB,
    "interrupt": kernel_calls.INTERRUPT,
    "maker": kernel_calls.MAKER,
    "thread": kernel_calls.THREAD,
    "control calls": control_calls.STUBS,
    "stub": initramfs.X86_LISTING,
    "actor": vmcore_files.ACTOR,
    "actor before 6.1": vmcore_files.ACTOR_BEFORE_6_1,
}
ARM64_LISTINGS = {
    "wakeup": irq_work_wakeup.ARM64_WAKEUP,
    "reschedule": irq_work_wakeup.ARM64_RESCHEDULE,
    "trace": irq_work_wakeup.ARM64_TRACE,
    "stub": initramfs.ARM_LISTING,
    "interrupt": arm64_calls.INTERRUPT,
    "maker": arm64_calls.MAKER,
    "thread": arm64_calls.THREAD,
    **arm64_control_stubs.ARM64_LISTINGS,
}
X86 = keystone.KS_ARCH_X86, keystone.KS_MODE_64
ARM64 = keystone.KS_ARCH_ARM64, keystone.KS_MODE_LITTLE_ENDIAN
AT = 0xFFFFFFFF70000000
FIELD = re.compile(r"(rel32|imm32|imm64):(\w+)")
SIZES = {"rel32": 4, "imm32": 4, "imm64": 8}


def symbols_of(listing: str) -> dict[str, int]:
    """Return symbol -> value for a listing: a number for symbols used as imm32, and a near address for all
    others.
    """
    found = sorted(set(FIELD.findall(listing)))
    return {
        name: 0x1234 if kind == "imm32" else AT + 0x1000_0010 * (n + 1)
        for n, (kind, name) in enumerate(found)
    }


def assembled(listing: str, symbols: dict[str, int], processor: tuple[int, int] = X86) -> bytes:
    """Return the code that keystone assembles from the instructions, with INT3 in the gaps.

    `symbols`: symbol -> value, as symbols_of() returns it. `processor`: keystone's numbers of the
    architecture and the mode.
    """
    assembler = cast("Any", keystone).Ks(*processor)
    code = b""
    for origin, lines in blocks(listing):
        code = code.ljust(origin, b"\xcc")
        text = "\n".join(relative(line, end, symbols) for line, end in lines)
        for name, value in symbols.items():
            text = re.sub(rf"\b{name}\b", hex(value), text)
        if text:
            code += bytes(assembler.asm(text, AT + origin)[0])
    return code


def relative(line: str, end: int, symbols: dict[str, int]) -> str:
    """Return `line` with each symbol after `rip +` replaced by its distance from `end`, the end of the
    instruction.

    keystone needs the distance in place of the address.
    """
    for name, value in symbols.items():
        line = re.sub(rf"rip \+ {name}\b", f"rip + {value - AT - end}", line)
    return line


def blocks(listing: str) -> list[tuple[int, list[tuple[str, int]]]]:
    """Return (offset, [(instruction, offset of its end)]) for each contiguous part of a listing."""
    found: list[tuple[int, list[tuple[str, int]]]] = [(0, [])]
    end = 0
    for line in filter(None, map(str.strip, listing.splitlines())):
        if line.startswith("org:"):
            end = int(line.removeprefix("org:"), 16)
            found.append((end, []))
        else:
            fields, _, instruction = line.partition("|")
            end += sum(SIZES.get(field.partition(":")[0], 1) for field in fields.split())
            found[-1][1].append((instruction.strip(), end))
    return found


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS)
def test_bytes_are_those_of_the_instructions(listing: str) -> None:
    symbols = symbols_of(listing)
    assert machine_code(listing, AT, symbols).hex(" ") == assembled(listing, symbols).hex(" ")


@pytest.mark.parametrize("listing", ARM64_LISTINGS.values(), ids=ARM64_LISTINGS)
def test_bytes_for_arm64(listing: str) -> None:
    symbols = symbols_of(listing)
    code = machine_code(listing, AT, symbols)
    assert code.hex(" ", 4) == assembled(listing, symbols, ARM64).hex(" ", 4)


def test_a_symbol_out_of_reach_is_refused() -> None:
    with pytest.raises(OverflowError):
        machine_code("e9 rel32:there | jmp there", 0, {"there": 1 << 40})
