"""Assembly of the routines for traps: `python -m emulated_kernel.machine.native.assemble` writes routines.py.

`--check` compares routines.py with a fresh assembly.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from emulated_kernel.machine.cpu.x86 import FLAG_NT, FLAG_RF, FLAG_TF
from emulated_kernel.machine.native.trap_words import FACTOR, TableWords, TrapWords
from emulated_kernel.util.abi import Vector

HERE = Path(__file__).parent
HOSTS = ("x86_64", "aarch64")
ROUTINES = HERE / "routines.py"
_HEAD = '''"""The assembled routines for traps; made by assemble.py from x86_64.s and aarch64.s."""

from __future__ import annotations

'''
_ROUTINE = "@routine "
DELIVERED_FLAGS = FLAG_TF | FLAG_NT | FLAG_RF
"""Flags, except the interrupt flag, that the delivery of an exception clears."""


def constants() -> dict[str, int]:
    """Return the names that the sources use, with their values."""

    def offsets(of: type[ctypes.Structure]) -> Iterator[tuple[str, int]]:
        return ((name, getattr(of, name).offset) for name, *_ in of._fields_)

    return {
        **dict(offsets(TrapWords)),
        **dict(offsets(TableWords)),
        "breakpoints_shift": TrapWords.breakpoints.offset + TableWords.shift.offset,
        "breakpoint_vector": int(Vector.BREAKPOINT),
        "debug_vector": int(Vector.DEBUG),
        "trap_flag": FLAG_TF,
        "not_trap_flag": ~FLAG_TF & 0xFFFFFFFF,
        "delivered_flags": DELIVERED_FLAGS,
        **{f"delivered_flags_{part}": DELIVERED_FLAGS >> 16 * part & 0xFFFF for part in range(2)},
        "factor": FACTOR,
        **{f"factor_{part}": FACTOR >> 16 * part & 0xFFFF for part in range(4)},
    }


def sources(host: str) -> dict[str, str]:
    """Return family of guests -> assembler text of its routine for one kind of host, without comments."""
    marker = {"x86_64": "#", "aarch64": "//"}[host]
    text = (HERE / f"{host}.s").read_text().format(**constants())
    lines = [line.partition(marker)[0].rstrip() for line in text.splitlines()]
    found: dict[str, list[str]] = {}
    for line in filter(None, lines):
        if line.startswith(_ROUTINE):
            here = found.setdefault(line.removeprefix(_ROUTINE), [])
        else:
            here.append(line)
    return {family: "\n".join(lines) for family, lines in found.items()}


def assemble(host: str) -> dict[str, bytes]:
    """Return family of guests -> machine code of its routine for one kind of host."""
    import keystone

    kinds = {
        "x86_64": (keystone.KS_ARCH_X86, keystone.KS_MODE_64),
        "aarch64": (keystone.KS_ARCH_ARM64, keystone.KS_MODE_LITTLE_ENDIAN),
    }
    assembler = cast("Any", keystone).Ks(*kinds[host])
    return {family: bytes(assembler.asm(text)[0]) for family, text in sources(host).items()}


def module_text() -> str:
    """Return the contents of routines.py."""
    made = {host: assemble(host) for host in HOSTS}
    lines = [
        f"    {(host, family)!r}: {_hex(code)}," for host in HOSTS for family, code in made[host].items()
    ]
    table = "\n".join(lines).replace("'", '"')
    return (
        f"{_HEAD}ROUTINES = {{\n{table}\n}}\n"
        '"""Machine of the host, as in uname -m, and family of guests -> position-independent code."""\n'
    )


def _hex(code: bytes) -> str:
    rows = [code[at : at + 32].hex() for at in range(0, len(code), 32)]
    return "bytes.fromhex(\n" + "\n".join(f'        "{row}"' for row in rows) + "\n    )"


def main() -> int:
    """Assemble; return 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare routines.py with a fresh assembly")
    if parser.parse_args().check:
        return int(ROUTINES.read_text() != module_text())
    ROUTINES.write_text(module_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
