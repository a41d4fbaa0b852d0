"""Assembly of the host's routines: `python -m emulated_kernel.machine.native.assemble` writes routines.py.

`--check` compares routines.py with a fresh assembly.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from emulated_kernel.machine.cpu.arm64 import BRK_EXCEPTION
from emulated_kernel.machine.cpu.x86 import FLAG_NT, FLAG_RF, FLAG_TF
from emulated_kernel.machine.native.copy_words import LONGEST_COPY, CopyRange, CopyWords
from emulated_kernel.machine.native.entry_words import Check, Move
from emulated_kernel.machine.native.quantum_words import QuantumWords
from emulated_kernel.machine.native.sum_words import ENTRY_SIZE, SUM, VICTIMS, SumWords
from emulated_kernel.machine.native.trap_words import FACTOR, LINKED, LinkWords, TableWords, TrapWords
from emulated_kernel.machine.native.tsc_words import (
    SHORTEST_STEP,
    STEP_ADDEND,
    STEP_FACTOR,
    STEP_SHIFT,
    TscWords,
)
from emulated_kernel.util.abi import Vector

HERE = Path(__file__).parent
HOSTS = ("x86_64", "aarch64")
ROUTINES = HERE / "routines.py"
_HEAD = '''"""The assembled routines; made by assemble.py from x86_64.s and aarch64.s."""

from __future__ import annotations

'''
_ROUTINE = "@routine "
_SHORT = 28
"""Maximum size in bytes of a routine that is written on the line of its name in routines.py."""
_LINE = 50
"""Maximum size in bytes of a routine that is written on one further line."""
DELIVERED_FLAGS = FLAG_TF | FLAG_NT | FLAG_RF
"""Mask of the x86 flags, except the interrupt flag, that the delivery of an exception clears."""


def constants() -> dict[str, int]:
    """Return the constants that the assembler sources use: name -> value."""

    def offsets(of: type[ctypes.Structure]) -> Iterator[tuple[str, int]]:
        return ((name, getattr(of, name).offset) for name, *_ in of._fields_)

    def whole(name: str, value: int) -> dict[str, int]:
        """Return name -> value for a 64-bit constant, and for its 16-bit parts, NAME_0 (lowest) to NAME_3."""
        return {name: value} | {f"{name}_{part}": value >> 16 * part & 0xFFFF for part in range(4)}

    return {
        **dict(offsets(TrapWords)),
        **dict(offsets(TableWords)),
        **dict(offsets(LinkWords)),
        **dict(offsets(TscWords)),
        **dict(offsets(QuantumWords)),
        **dict(offsets(CopyWords)),
        **dict(offsets(CopyRange)),
        **dict(offsets(Check)),
        **dict(offsets(Move)),
        "check_size": ctypes.sizeof(Check),
        "move_size": ctypes.sizeof(Move),
        "linked": LINKED,
        **dict(offsets(SumWords)),
        "sum": SUM,
        "sum_1": SUM >> 16,
        "not_sum": ~SUM & 0xFFFFFFFF,
        "entry_size": ENTRY_SIZE,
        "victims_size": VICTIMS * ENTRY_SIZE,
        "range_size": ctypes.sizeof(CopyRange),
        "breakpoints_shift": TrapWords.breakpoints.offset + TableWords.shift.offset,
        "breakpoint_vector": int(Vector.BREAKPOINT),
        "brk_exception": BRK_EXCEPTION,
        "debug_vector": int(Vector.DEBUG),
        "trap_flag": FLAG_TF,
        "not_trap_flag": ~FLAG_TF & 0xFFFFFFFF,
        "delivered_flags": DELIVERED_FLAGS,
        **{f"delivered_flags_{part}": DELIVERED_FLAGS >> 16 * part & 0xFFFF for part in range(2)},
        "shortest_step": SHORTEST_STEP,
        "step_shift": STEP_SHIFT,
        **whole("longest_copy", LONGEST_COPY),
        **whole("factor", FACTOR),
        **whole("step_factor", STEP_FACTOR),
        **whole("step_addend", STEP_ADDEND),
    }


def sources(host: str) -> dict[str, str]:
    """Return a map: name of a routine -> its assembler text, without comments, for `host` (see HOSTS).

    The text before the first routine, which contains macros, is the beginning of each routine's text.
    """
    marker = {"x86_64": "#", "aarch64": "//"}[host]
    text = (HERE / f"{host}.s").read_text().format(**constants())
    lines = [line.partition(marker)[0].rstrip() for line in text.splitlines()]
    macros: list[str] = []
    found: dict[str, list[str]] = {}
    here = macros
    for line in filter(None, lines):
        if line.startswith(_ROUTINE):
            here = found.setdefault(line.removeprefix(_ROUTINE), [])
        else:
            here.append(line)
    return {name: "\n".join(macros + lines) for name, lines in found.items()}


def assemble(host: str) -> dict[str, bytes]:
    """Return a map: name of a routine -> its machine code for `host` (see HOSTS)."""
    import keystone

    kinds = {
        "x86_64": (keystone.KS_ARCH_X86, keystone.KS_MODE_64),
        "aarch64": (keystone.KS_ARCH_ARM64, keystone.KS_MODE_LITTLE_ENDIAN),
    }
    assembler = cast("Any", keystone).Ks(*kinds[host])
    return {name: bytes(assembler.asm(text)[0]) for name, text in sources(host).items()}


def module_text() -> str:
    """Return the contents of routines.py."""
    made = {host: assemble(host) for host in HOSTS}
    lines = [f"    {(host, name)!r}: {_hex(code)}," for host in HOSTS for name, code in made[host].items()]
    table = "\n".join(lines).replace("'", '"')
    return (
        f"{_HEAD}ROUTINES = {{\n{table}\n}}\n"
        '"""Machine of the host, as in uname -m, and name of a routine -> position-independent code."""\n'
    )


def _hex(code: bytes) -> str:
    if len(code) <= _SHORT:
        return f'bytes.fromhex("{code.hex()}")'
    size = len(code) if len(code) <= _LINE else 32
    rows = [code[at : at + size].hex() for at in range(0, len(code), size)]
    return "bytes.fromhex(\n" + "\n".join(f'        "{row}"' for row in rows) + "\n    )"


def main() -> int:
    """Write routines.py, and return 0.

    With `--check`, write nothing; return 1 if routines.py differs from a fresh assembly, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare routines.py with a fresh assembly")
    if parser.parse_args().check:
        return int(ROUTINES.read_text() != module_text())
    ROUTINES.write_text(module_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
