"""The host's code in the guest: the bytes of each listing are those of its instructions, by keystone."""

from __future__ import annotations

import re
from typing import Any, cast

import keystone
import pytest

from emulated_kernel.guests.linux import initramfs
from emulated_kernel.guests.linux.guest import wakeup_thunk
from emulated_kernel.guests.linux.mounts import control_calls
from emulated_kernel.guests.linux.probing import kernel_calls
from emulated_kernel.guests.linux.vmcore import vmcore_files
from emulated_kernel.util.code_listing import machine_code

LISTINGS = {
    "wakeup": wakeup_thunk.WAKEUP,
    "interrupt": kernel_calls.INTERRUPT,
    "maker": kernel_calls.MAKER,
    "thread": kernel_calls.THREAD,
    "control calls": control_calls.STUBS,
    "stub": initramfs.STUB_LISTING,
    "actor": vmcore_files.ACTOR,
    "actor before 6.1": vmcore_files.ACTOR_BEFORE_6_1,
}
AT = 0xFFFFFFFF70000000
FIELD = re.compile(r"(rel32|imm32|imm64):(\w+)")
RELATIVE_OPERAND = "rip + "


def symbols_of(listing: str) -> dict[str, int]:
    """Return a value for each symbol: an offset for an imm32, an address in reach for all others."""
    found = sorted(set(FIELD.findall(listing)))
    return {
        name: 0x1234 if kind == "imm32" else AT + 0x1000_0010 * (n + 1)
        for n, (kind, name) in enumerate(found)
    }


def assembled(listing: str, symbols: dict[str, int]) -> bytes:
    """Return what keystone makes of the instructions, with INT3 in the gaps."""
    assembler = cast("Any", keystone).Ks(keystone.KS_ARCH_X86, keystone.KS_MODE_64)
    code = b""
    for origin, lines in blocks(listing):
        code = code.ljust(origin, b"\xcc")
        text = "\n".join(lines)
        for name, value in symbols.items():
            # keystone takes an operand behind rip for the distance, not for the address.
            text = text.replace(f"{RELATIVE_OPERAND}{name}", f"{RELATIVE_OPERAND}{value - AT - 7}")
            text = re.sub(rf"\b{name}\b", hex(value), text)
        if text:
            code += bytes(assembler.asm(text, AT + origin)[0])
    return code


def blocks(listing: str) -> list[tuple[int, list[str]]]:
    """Return the offset and the instructions of each part that is in one piece."""
    found: list[tuple[int, list[str]]] = [(0, [])]
    for line in filter(None, map(str.strip, listing.splitlines())):
        if line.startswith("org:"):
            found.append((int(line.removeprefix("org:"), 16), []))
        else:
            found[-1][1].append(line.partition("|")[2].strip())
    return found


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS)
def test_bytes_are_those_of_the_instructions(listing: str) -> None:
    symbols = symbols_of(listing)
    assert machine_code(listing, AT, symbols).hex(" ") == assembled(listing, symbols).hex(" ")


def test_a_symbol_out_of_reach_is_refused() -> None:
    with pytest.raises(OverflowError):
        machine_code("e9 rel32:there | jmp there", 0, {"there": 1 << 40})
