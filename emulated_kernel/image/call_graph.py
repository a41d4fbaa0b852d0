"""Call graph of a prebuilt image: which functions its system calls can execute, by the image's machine code.

`python -m emulated_kernel.image.call_graph` writes prebuilt/ARCH/FILE_NAME for each architecture of
ARCHITECTURES. `--check` compares these files with the images. A function can execute the functions to which
its calls and jumps lead. An indirect call or jump may lead to any function whose address occurs in the
image's text or data. Addresses do not count if they are in a table that is not used for calls, or in
`sys_call_table`, which only dispatches system calls. The result also has functions that are never executed.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property

from emulated_kernel.image.builtin_image import PREBUILT, KernelImage, load_image
from emulated_kernel.image.kallsyms import TEXT_TYPES
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.safe_read import read_regular

FILE_NAME = "calls.json"
ARCHITECTURES = ("i386", "x86_64")
"""Architectures whose machine code can be analysed."""
_LIMIT = 1 << 20
"""Maximum size in bytes of the file FILE_NAME of an image."""
_TABLE = "sys_call_table"
_NUMBER = "nr."
"""Prefix of the names of system calls in the image's ABI table, such as `nr.read`."""
_NOT_CALLED = (_TABLE, "__stop_kprobe_blacklist", "__stop___ex_table", "__start_mcount_loc", "__guest_abi")
"""Symbols that identify tables whose function addresses are not called.

Each is the last symbol at or before the start of its table. The second symbol identifies the tables of
kallsyms, and the third the table of fentry sites.
"""
_ENTRIES = ("asm_host_interrupt",)
"""Functions at which exceptions and interrupts enter the kernel, after any instruction."""


class Calls:
    """Kinds of system calls of clients, as bits of a mask.

    The kinds are plain numbers, because each `&` of an IntFlag would take 0.5 us.
    """

    NAMES = 1
    """System calls of clients that are of no other kind, such as open(2), close(2) and rename(2)."""
    READS = 2
    WRITES = 4
    ALL = 7


_OF_KIND: Mapping[int, tuple[str, ...]] = {
    Calls.READS: ("read", "pread64"),
    Calls.WRITES: ("write", "pwrite64"),
}
"""Kind -> names of its system calls. All other system calls of clients are of the kind Calls.NAMES."""
_OF_PROGRAMS = frozenset({
    "accept", "accept4", "bind", "clock_gettime", "connect", "delete_module", "dup", "dup2", "dup3", "getcwd",
    "getgid", "getpeername", "getpid", "getppid", "getsockname", "gettid", "gettimeofday", "getuid",
    "host_call", "init_module", "listen", "nanosleep", "pipe", "pipe2", "poll", "ppoll", "recvfrom",
    "sched_getaffinity", "sched_yield", "sendto", "setgid", "setuid", "shutdown", "socket", "wait4",
})  # fmt: skip
"""Names of the system calls that only the guest's own programs make, never the task of a client."""


class FunctionCalls:
    """Finds the kinds of system calls that can execute a function of an image."""

    def __init__(self, image: KernelImage) -> None:
        """Read the file FILE_NAME of an image.

        If the image has no valid file, all kinds of system calls count as able to execute each function.
        """
        self._image = image
        self._file = b""
        with suppress(OSError):
            self._file = read_regular(image.path.with_name(FILE_NAME), _LIMIT)

    @cached_property
    def _known(self) -> tuple[list[int], bytes] | None:
        """Sorted addresses of the functions, and a mask of Calls for each; None without a valid file."""
        try:
            found = json.loads(self._file)
            masks = bytes.fromhex(found["masks"])
            checksum = found["checksum"]
        except (ValueError, KeyError, TypeError):
            return None
        starts = _starts(self._image)
        return (starts, masks) if (checksum, len(masks)) == (self._image.checksum, len(starts)) else None

    def of(self, address: int) -> int:
        """Return the kinds of system calls that can execute the function at `address`, as a mask of Calls.

        Return Calls.ALL for text outside the image's functions, such as a module's, or if the image has no
        valid file FILE_NAME.
        """
        if self._known is None:
            return Calls.ALL
        starts, masks = self._known
        at = bisect_right(starts, address) - 1
        return masks[at] if at >= 0 and address < self._end else Calls.ALL

    @cached_property
    def _end(self) -> int:
        """Address after the last function."""
        assert self._known is not None
        last = self._image.kallsyms.lookup(self._known[0][-1])
        assert last is not None
        return last.symbol.address + last.symbol.size


def _starts(image: KernelImage) -> list[int]:
    # Each boot needs the addresses, and reading them from Symbol objects would take ten times as long.
    table = image.kallsyms.table
    return sorted(
        {at for at, kind in zip(table.addresses, table.types, strict=True) if chr(kind) in TEXT_TYPES}
    )


def file_text(image: KernelImage) -> str:
    """Return the contents of the file FILE_NAME for an image."""
    graph = _Graph(image)
    executed = {kind: graph.executed(kind) for kind in (Calls.NAMES, Calls.READS, Calls.WRITES)}
    masks = bytes(
        sum(kind for kind, functions in executed.items() if start in functions) for start in graph.starts
    )
    return json.dumps({"checksum": image.checksum, "masks": masks.hex()}, indent=1) + "\n"


class _Graph:
    """The calls and jumps between an image's functions. A function is identified by its address."""

    def __init__(self, image: KernelImage) -> None:
        self._image = image
        self.starts = _starts(image)
        self._functions = set(self.starts)
        self._leads_to: dict[int, set[int]] = {start: set() for start in self.starts}
        """Function -> functions to which its calls and jumps lead."""
        self._jumps_anywhere: set[int] = set()
        """Functions with indirect calls or jumps."""
        self._targets: set[int] = set()
        """Functions to which an indirect call or jump may lead."""
        table = image.kallsyms.lookup_name(_TABLE)
        assert table is not None, "the image has no table of system calls"
        self._table = table
        self._dispatchers: set[int] = set()
        """Functions that use the table of system calls."""
        assert not any("indirect_thunk" in symbol.name for symbol in image.kallsyms.symbols)
        for segment in image.segments:
            if segment.prot & Prot.EXEC:
                self._read_text(segment.va, segment.data)
            else:
                self._read_data(segment.va, segment.data)

    def _function_at(self, address: int) -> int | None:
        at = bisect_right(self.starts, address) - 1
        return self.starts[at] if at >= 0 else None

    def _read_text(self, start: int, text: bytes) -> None:
        from iced_x86 import Decoder, FlowControl, Instruction, Mnemonic, OpKind, Register

        ends = (FlowControl.UNCONDITIONAL_BRANCH, FlowControl.RETURN, FlowControl.INDIRECT_BRANCH)
        indirect = (FlowControl.INDIRECT_CALL, FlowControl.INDIRECT_BRANCH)
        before: tuple[int, bool] | None = None
        mask = (1 << self._image.bits) - 1

        def numbers(insn: Instruction) -> Iterator[int]:
            """Yield an instruction's displacement and immediate operands, which may be addresses."""
            for at in range(insn.op_count):
                if insn.op_kind(at) == OpKind.MEMORY:
                    yield insn.memory_displacement & mask
                elif insn.op_kind(at) in (OpKind.IMMEDIATE32, OpKind.IMMEDIATE64, OpKind.IMMEDIATE32TO64):
                    yield insn.immediate(at) & mask

        def changes_nothing(insn: Instruction) -> bool:
            if insn.mnemonic == Mnemonic.LEA:
                is_zero = not insn.memory_displacement and insn.memory_index == Register.NONE
                return is_zero and insn.memory_base == insn.op0_register
            is_move = insn.mnemonic in (Mnemonic.MOV, Mnemonic.XCHG) and insn.op1_kind == OpKind.REGISTER
            return insn.mnemonic == Mnemonic.NOP or (is_move and insn.op0_register == insn.op1_register)

        for insn in Decoder(self._image.bits, text, ip=start):
            function = self._function_at(insn.ip)
            if function is None:
                continue
            # The function before may continue in this one.
            if before is not None and before[0] != function and before[1]:
                self._leads_to[before[0]].add(function)
            flow = insn.flow_control
            # After an end, there may be padding up to the next function.
            if before is None or before[0] != function or not changes_nothing(insn):
                before = function, flow not in ends and insn.mnemonic not in (Mnemonic.UD2, Mnemonic.INT3)
            if insn.op_count and insn.op0_kind in (OpKind.NEAR_BRANCH64, OpKind.NEAR_BRANCH32):
                target = self._function_at(insn.near_branch_target)
                if target is not None:
                    self._leads_to[function].add(target)
            if flow in indirect:
                self._jumps_anywhere.add(function)
            for number in numbers(insn):
                if number in self._functions:
                    self._targets.add(number)
                if number == self._table:
                    self._dispatchers.add(function)

    def _read_data(self, start: int, data: bytes) -> None:
        names = sorted((s.address, s.name) for s in self._image.kallsyms.symbols if not s.is_text)
        addresses = [address for address, _ in names]
        size = self._image.bits // 8
        for at in range(0, len(data) - size + 1, size):
            value = int.from_bytes(data[at : at + size], "little")
            if value in self._functions:
                symbol = bisect_right(addresses, start + at) - 1
                if names[symbol][1] not in _NOT_CALLED:
                    self._targets.add(value)

    def _system_calls(self) -> dict[str, int]:
        """Return name of a system call -> address of the function that implements it."""
        size = self._image.bits // 8
        found = {}
        for name, number in self._image.abi.items():
            if name.startswith(_NUMBER):
                entry = self._image.read(self._table + number * size, size)
                found[name.removeprefix(_NUMBER).removeprefix("ia32_")] = int.from_bytes(entry, "little")
        return found

    def executed(self, kind: int) -> set[int]:
        """Return the addresses of the functions that system calls of the kind `kind` can execute."""
        calls = self._system_calls()
        names = set(calls) - _OF_PROGRAMS - {name for names in _OF_KIND.values() for name in names}
        own = [calls[name] for name in _OF_KIND.get(kind, tuple(names))]
        entries = [self._image.kallsyms.lookup_name(name) for name in _ENTRIES]
        return self._closure([*own, *self._around_calls(), *(each for each in entries if each is not None)])

    def _around_calls(self) -> Iterable[int]:
        """Return the functions that use the table of system calls, and the functions that lead to them.

        A function leads to another by calls and jumps, directly or through other functions.
        """
        found = set(self._dispatchers)
        while more := {f for f, to in self._leads_to.items() if not to.isdisjoint(found)} - found:
            found |= more
        return found

    def _closure(self, roots: Iterable[int]) -> set[int]:
        seen: set[int] = set()
        todo = list(roots)
        while todo:
            function = todo.pop()
            if function in seen:
                continue
            seen.add(function)
            todo += self._leads_to.get(function, ())
            if function in self._jumps_anywhere:
                todo += self._targets
        return seen


def main() -> int:
    """Write the files of the prebuilt images, and return 0.

    With `--check`, write nothing, and return 1 if one of the files differs from its image, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m emulated_kernel.image.call_graph", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files with the images")
    is_check = parser.parse_args().check
    differs = False
    for arch in ARCHITECTURES:
        file = PREBUILT / arch / FILE_NAME
        text = file_text(load_image(arch=arch))
        if is_check:
            differs |= not file.exists() or file.read_text() != text
        else:
            file.write_text(text)
    return int(differs)


if __name__ == "__main__":
    raise SystemExit(main())
