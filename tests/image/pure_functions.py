"""Pure functions under emulation, compared with the same sources compiled for the host.

`python -m tests.image.pure_functions` compares tens of thousands of calls for each architecture.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from time import monotonic

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
from tests.image import pure_host
from tests.image.pure_table import ARENA, PURE, Argument, Call, Function, Pure, Ref, Result

GFP_KERNEL = 0xCC0
MAX_SHOWN = 5
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call: the part of the result that counts, and the memory afterwards."""

    result: int
    memory: bytes


def _counts(kind: Result, value: int, bits: int, base: int) -> int:
    """Return the part of a result register that the result type `kind` defines. A pointer becomes an offset
    from `base`, plus 1.
    """
    match kind:
        case Result.NOTHING:
            return 0
        case Result.BYTE:
            return value & 0xFF
        case Result.SHORT:
            return value & 0xFFFF
        case Result.INT:
            return value & 0xFFFFFFFF
        case Result.WORD:
            return value & ((1 << bits) - 1)
        case Result.POINTER:
            return value - base + 1 if value else 0


class Host:
    """Calls functions in a shared object."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._arena = ctypes.create_string_buffer(ARENA)
        self._base = ctypes.addressof(self._arena)

    def call(self, pure: Pure, call: Call) -> Outcome:
        """Put the data of a call into the arena, and make the call."""
        self._arena[: len(call.memory)] = bytes(call.memory)
        function = getattr(self._library, pure.name)
        function.restype = ctypes.c_uint64
        result = function(*(ctypes.c_uint64(self._value(arg)) for arg in call.args))
        memory = self._arena[: len(call.memory)]
        return Outcome(_counts(pure.result, result, call.bits, self._base), memory)

    def _value(self, arg: Argument) -> int:
        match arg:
            case Ref():
                return self._base + arg.offset
            case Function():
                return ctypes.cast(getattr(self._library, arg.name), ctypes.c_void_p).value or 0
            case _:
                return arg & _WORD


class Emulated:
    """Calls functions in a booted kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._machine = kernel.machine
        self._symbols = kernel.image.kallsyms
        self.bits = kernel.image.bits
        self._base = kernel.call("__kmalloc", ARENA, GFP_KERNEL)

    def call(self, pure: Pure, call: Call) -> Outcome:
        """Put the data of a call into the arena, and make the call."""
        memory = self._machine.memory
        if call.memory:
            memory.write(self._base, bytes(call.memory))
        address = self._address(pure.name)
        result = self._machine.call(address, *map(self._value, call.args), variadic=call.variadic)
        after = memory.read(self._base, len(call.memory)) if call.memory else b""
        return Outcome(_counts(pure.result, result, self.bits, self._base), after)

    def _address(self, name: str) -> int:
        address = self._symbols.lookup_name(name)
        assert address is not None, f"{name} is not in the image"
        return address

    def _value(self, arg: Argument) -> int:
        match arg:
            case Ref():
                return self._base + arg.offset
            case Function():
                return self._address(arg.name)
            case _:
                return arg


def compare(kernel: Kernel, library: ctypes.CDLL, count: int, seed: int) -> list[str]:
    """Make `count` calls, distributed over all functions; return the first differences, one per line."""
    host, emulated = Host(library), Emulated(kernel)
    rng = random.Random(seed)
    different: list[str] = []
    for pure in islice(cycle(each for each in PURE if each.least_bits <= emulated.bits), count):
        call = Call(rng, emulated.bits)
        call.args = pure.make(call)
        expected, found = host.call(pure, call), emulated.call(pure, call)
        if expected != found:
            different.append(f"{pure.name}{call.args}: {_difference(expected, found)}")
        if len(different) >= MAX_SHOWN:
            break
    return different


def _difference(expected: Outcome, found: Outcome) -> str:
    if expected.result != found.result:
        return f"{expected.result:#x} here, {found.result:#x} there"
    at = next(n for n, (a, b) in enumerate(zip(expected.memory, found.memory, strict=True)) if a != b)
    return f"at {at}: {expected.memory[at : at + 8].hex()} here, {found.memory[at : at + 8].hex()} there"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status: 0, or 1 for differences, or 77 if nothing can be compiled."""
    parser = argparse.ArgumentParser(prog="python -m tests.image.pure_functions", description=__doc__)
    parser.add_argument("--count", type=int, default=50_000, help="for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--arch", choices=ARCHITECTURES, action="append", help="default: all")
    options = parser.parse_args(argv)
    reason = pure_host.why_not()
    if reason is not None:
        print(f"not compared: {reason}", file=sys.stderr)
        return 77
    status = 0
    with tempfile.TemporaryDirectory(prefix="kprobefs-pure-") as directory:
        library = pure_host.build(Path(directory))
        for arch in options.arch or ARCHITECTURES:
            started = monotonic()
            with Kernel(MachineConfig(arch=arch)) as kernel:
                different = compare(kernel, library, options.count, options.seed)
            seconds = monotonic() - started
            calls = f"{options.count} calls of {len({pure.name for pure in PURE})} functions"
            print(f"{arch}: {calls}, {len(different)} differ, {seconds:.0f} s")
            for line in different:
                print(f"  {line}")
            status |= bool(different)
    return status


if __name__ == "__main__":
    sys.exit(main())
