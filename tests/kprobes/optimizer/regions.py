"""Execution of pieces of the image from random states, with which probed runs are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from operator import and_
from typing import Any, NamedTuple

from iced_x86 import Register, RflagsBits

from emulated_kernel.arch.analysis.dataflow import solve
from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.riscv.analysis import RiscvFunctionAnalysis, as_live
from emulated_kernel.arch.riscv.insn import ALL_REGISTERS, RiscvOpcode, decode_all
from emulated_kernel.arch.x86.insn import iced_decoder
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.errors import KernelError
from tests.arch.decoding import insn_length
from tests.kprobes.blacklist import is_blacklisted
from tests.kprobes.optimizer.conftest import Probed
from tests.snapshot import DataSnapshot, data_snapshot, image_data

_ICED_FLAGS = {
    0x1: RflagsBits.CF,
    0x4: RflagsBits.PF,
    0x10: RflagsBits.AF,
    0x40: RflagsBits.ZF,
    0x80: RflagsBits.SF,
    0x800: RflagsBits.OF,
}
ARITHMETIC = tuple(_ICED_FLAGS)
STATUS_FLAGS = sum(ARITHMETIC)
COUNTS = ("cx", "dx")
"""Registers with counts. With a huge count, a string instruction would write outside of the snapshot.

memcpy takes the count from dx.
"""
STATES = 3
SCRATCH = 16 << 10

State = Any
"""All registers of a CPU."""

Live = Callable[[int | None], LiveRegisters]
"""Function: address of an exit, or None for a return -> registers that must be the same with the probe."""

Place = tuple[str, int, int]
"""A symbol, an offset in it, and their address."""

_INSTRUCTIONS: dict[object, Sequence[Place]] = {}
"""Tables of an image -> its instructions, which dozens of tests need."""

Pieces = Sequence[tuple[int, bytes]]
"""Addresses and the bytes at them."""


class End(NamedTuple):
    """End of a run: its registers, or its fault."""

    registers: State | None
    fault: tuple[int, int, int] | None
    met: int | None
    """The exit by which the run left the piece; None if it left by a return or an indirect jump."""


@dataclass(frozen=True)
class Expected:
    """The end that an unprobed run from a state had. A probed run from the same state must have an equal
    end.
    """

    end: End
    written: Mapping[int, int]
    live: tuple[int, ...]
    """Masks of the bits that must be the same in a probed run, one mask for each register."""
    registers: tuple[int, ...] | None
    """Value of each register at the end, masked by `live`; None if the run has faulted."""
    memory: DataSnapshot
    """All memory at the end, except `free`."""
    free: range
    """Addresses of the stack that was unused at the start; memory that the piece did not write may differ."""
    written_in_free: Pieces
    undo: Pieces
    """Bytes to write after a run with this end, to restore the memory."""

    def is_met(self, end: End, memory: Memory) -> bool:
        """Return True if a run that ended with `end` and left `memory` equals the unprobed run."""
        registers = end.registers and tuple(map(and_, end.registers, self.live))
        return (
            registers == self.registers
            and end[1:] == self.end[1:]
            and self.memory.unchanged()
            and all(memory.read(at, 1) == byte for at, byte in self.written_in_free)
        )


def loose_flags(code: bytes, addr: int, bits: int, *, live: bool) -> int:
    """Return the flags that may differ between two runs of the same instructions.

    If the instructions leave a flag undefined, an emulator computes this flag from earlier values. If no flag
    was live before (`live` is False), flags that no instruction touches may differ, too.
    """
    undefined = touched = loose = 0
    for insn in (*iced_decoder(code, addr, bits), None):
        if insn is None or insn.near_branch_target:
            # The piece may be left here.
            loose |= undefined | (0 if live else ~touched)
        if insn is not None:
            touched |= insn.rflags_modified
            undefined = undefined & ~insn.rflags_modified | insn.rflags_undefined
    return sum(flag for flag, bit in _ICED_FLAGS.items() if loose & bit)


def undefined_flags(code: bytes, addr: int, bits: int) -> int:
    """Return the flags that some of the instructions leave undefined; all paths are considered.

    Linux: smp_mb() adds 0 to the word below the stack. Interrupts and detours leave their frames there, so
    the flags of the sum depend on these frames.
    """
    undefined = 0
    for insn in iced_decoder(code, addr, bits):
        undefined |= insn.rflags_undefined
        is_below_stack = insn.memory_base == Register.RSP and insn.memory_displacement >> (bits - 1)
        if is_below_stack:
            undefined |= insn.rflags_modified
    return sum(flag for flag, bit in _ICED_FLAGS.items() if undefined & bit)


def piece_size(probed: Probed, region: Region) -> int:
    """Return the size of all instructions that a jump covers, including instructions whose bytes the jump
    keeps.
    """
    if not region.kept:
        return region.length
    size = region.length + probed.kernel.arch.max_insn_size
    code = probed.kernel.machine.text.original(region.addr, size)
    starts = probed.kernel.arch.instruction_boundaries(code, region.addr)
    return next(start - region.addr for start in starts if start >= region.addr + region.length)


def exits(probed: Probed, address: int, size: int) -> tuple[int, ...]:
    """Return the addresses at which the CPU can leave the `size` bytes of code at `address`.

    They are the address after the code, and the targets of direct branches out of the code.
    """
    arch = probed.kernel.arch
    end = address + size
    code = probed.kernel.machine.text.original(address, size)
    if arch.registers.link is not None:
        targets = set(_riscv_targets(code, address, compressed=arch.name == "riscv64"))
    else:
        targets = {insn.near_branch_target for insn in iced_decoder(code, address, arch.bits)} - {0}
    return end, *sorted(targets - {*range(address, end + 1)})


def _riscv_targets(code: bytes, address: int, *, compressed: bool) -> Iterator[int]:
    upper: dict[int, int] = {}
    for at, insn in decode_all(code, address, compressed=compressed):
        if insn.relative_target is not None:
            yield at + insn.relative_target
        elif insn.opcode == RiscvOpcode.AUIPC:
            upper[insn.rd] = at + insn.upper_immediate
        elif insn.opcode == RiscvOpcode.JALR and insn.rs1 in upper:
            yield upper[insn.rs1] + insn.immediate


def live_at_exit(probed: Probed, address: int, end: int) -> LiveRegisters:
    """Return the registers that code may read after the exit `end` of a region at `address`.

    On RISC-V, a temporary register that a function does not name is free in the whole function, also at its
    calls (RiscvFunctionAnalysis.live_mask). If the exit leads to another function, such a register is live
    only if an instruction of the other function names and reads it. The other function's returns, calls and
    breakpoints, which the analysis regards as reading all registers, do not count.
    """
    verdict, symbols = probed.verdict, probed.kernel.image.kallsyms
    left, entered = symbols.lookup(address), symbols.lookup(end)
    live = verdict.live_at(end)
    if left is None or entered is None or left.symbol == entered.symbol:
        return live
    before, behind = verdict._analysis(address), verdict._analysis(end)
    if not isinstance(before, RiscvFunctionAnalysis) or not isinstance(behind, RiscvFunctionAnalysis):
        return live
    relevant = ALL_REGISTERS & before._relevant
    effects = {
        at: effect._replace(reads=effect.reads & (relevant | behind.insns[at].mentioned))
        for at, effect in behind._effects.items()
    }
    read = solve(effects, relevant).get(end, ALL_REGISTERS)
    return replace(live, registers=live.registers & as_live(read).registers)


@cache
def _bits(
    live: LiveRegisters, everything: LiveRegisters, loose: int, fields: tuple[str, ...]
) -> tuple[int, ...]:
    dead = everything.registers - live.registers
    flags = (~STATUS_FLAGS if everything.flags and not live.flags else -1) & ~loose
    return tuple(flags if name == "flags" else -(name not in dead) for name in fields)


_BELOW, _ABOVE = 2048, 512
"""Numbers of bytes below and above the stack pointer that are restored after each run."""


class Bench:
    """Runs pieces of the image from random states, and restores the memory after each run."""

    def __init__(self, probed: Probed) -> None:
        self.machine = machine = probed.kernel.machine
        self._arch = arch = probed.kernel.arch
        self._model = model = machine.model
        self.all_live = probed.verdict.live_at(0)
        """All registers and flags, which count as live at the unknown address 0."""
        self.noise = 64 if arch.bits == 64 else 31
        """Maximum number of bits of random numbers; on i386, a wider number could be a pointer."""
        self.general = [name for name in model.registers if name not in ("sp", "ip", *model.saved_in_calls)]
        """Registers that may have any value."""
        self.frame = (len(arch.pt_regs) + 1) * arch.word_size
        """Number of bytes below the stack pointer that a detour uses, and that hold no data of the kernel."""
        self.scratch = machine.alloc_pages(SCRATCH)
        machine.memory.write(self.scratch, self._numbers(SCRATCH))
        self.sp = machine.calls.stack_top - _ABOVE
        # A region may end in `ret`, after any number of pops.
        self._pad = model.layout.host_text
        machine.memory.write(self.sp, self._pad.to_bytes(arch.word_size, "little") * 60)
        self._snapshot = data_snapshot(machine, [*self._data(), (self.sp - _BELOW, _BELOW + _ABOVE)])
        self._met: int | None = None
        """Exit at which the last run has ended; None if it ended by a return, an indirect jump or a fault."""

    def _numbers(self, size: int) -> bytes:
        """Return `size` random bytes that are not pointers to memory. Through a pointer, a run could change
        memory that is not compared.
        """
        found = random.Random(7).randbytes(size)
        if self._arch.bits == 64:
            return found
        kernel = self._model.layout.direct_map >> 24
        return bytes(byte - 0x40 if byte >= kernel else byte for byte in found)

    def _data(self) -> list[tuple[int, int]]:
        """Return address and size of all memory that runs may write, except the stack."""
        return [*image_data(self.machine), (self.scratch, SCRATCH)]

    def states(self, seed: int) -> Iterator[State]:
        """Yield random states with pointers, numbers and flags; equal seeds give equal states."""
        dice = random.Random(seed)
        kept = {name: self.machine.regs.get(name) for name in self._model.saved_in_calls}
        interrupts_on = self._model.register_set().flags | self._model.interrupt_flag
        arithmetic = ARITHMETIC if self.all_live.flags else ()
        for _ in range(STATES):
            values = {
                name: dice.choice(
                    (
                        self.scratch + 8 * dice.randrange(512, 1536),
                        dice.randrange(256),
                        dice.getrandbits(self.noise),
                    )
                )
                for name in self.general
            }
            values |= {name: dice.randrange(256) for name in COUNTS if name in values}
            flags = interrupts_on | sum(flag for flag in arithmetic if dice.random() < 0.5)
            yield self._model.register_set(**values, **kept, sp=self.sp, flags=flags)

    @contextmanager
    def trapping(self, handlers: Mapping[int, Callable[[Regs], None]]) -> Iterator[None]:
        """Within the block, replace the code at the addresses of `handlers` by breakpoints with these
        handlers.
        """
        breakpoints, text, trap = self.machine.breakpoints, self.machine.text, self._arch.breakpoint
        usual = {addr: (text.current(addr, len(trap)), breakpoints.get(addr)) for addr in handlers}
        breakpoints.update(handlers)
        for addr in handlers:
            text.poke(addr, trap)
        try:
            yield
        finally:
            for addr, (code, handler) in usual.items():
                text.poke(addr, code)
                if handler is None:
                    del breakpoints[addr]
                else:
                    breakpoints[addr] = handler

    def until(self, *ends: int) -> AbstractContextManager[None]:
        """Within the block, end a run before it executes an instruction at one of the addresses `ends`."""

        def stop(regs: Regs) -> None:
            self._met = regs.ip - len(self._arch.breakpoint)
            regs.ip = self._pad

        return self.trapping(dict.fromkeys(ends, stop))

    def _run(self, start: State) -> End:
        """Run until the end of the piece, a return or a fault; do not restore the memory."""
        self._met = None
        trap, state = self.machine.trap_of(start, fixup=True)
        if trap.address == self._pad + len(self._model.halt):
            return End(state, None, self._met)
        return End(None, (trap.vector, trap.error_code, trap.cr2), self._met)

    def step(self, start: State, targets: Iterable[int]) -> End:
        """Execute a single instruction; after a fault, also execute the first instruction of its fixup. Do
        not restore the memory.

        `targets`: addresses to which the instruction may jump. On a machine without a trap flag, breakpoints
        stop the run.
        """
        flag = self._arch.trap_flag
        if not flag:
            with self.until(self._behind(start.ip), *targets):
                end = self._run(start)
            if end.registers is None:
                return end
            # A return leads to the pad, whose first instruction stops the CPU.
            ip = self._pad if self._met is None else self._met
            return end._replace(registers=end.registers._replace(ip=ip))
        trap, state = self.machine.trap_of(start._replace(flags=start.flags | flag), fixup=True)
        if trap.vector == Vector.DEBUG:
            return End(state._replace(flags=state.flags & ~flag), None, state.ip)
        return End(None, (trap.vector, trap.error_code, trap.cr2), None)

    def _behind(self, addr: int) -> int:
        """Return the address after an instruction.

        If the code cannot be decoded, assume the length of a breakpoint.
        """
        code = self.machine.text.current(addr, self._arch.max_insn_size)
        try:
            return addr + insn_length(self._arch, code)
        except KernelError:
            return addr + len(self._arch.breakpoint)

    def run(self, start: State) -> End:
        """Run the piece, and return its end."""
        end = self._run(start)
        self.restore()
        return end

    def expect(self, start: State, live: Live | None = None, loose: int = 0) -> Expected:
        """Run the unprobed piece, and return the end that a probed run must have.

        `live`: registers and flags that must be equal at the exit taken, except the flags `loose`; None: all.
        """
        end = self._run(start)
        free = range(start.sp - self.frame, start.sp)
        stack = [(self.sp - _BELOW, free.start - self.sp + _BELOW), (free.stop, self.sp + _ABOVE - free.stop)]
        memory = data_snapshot(self.machine, [*self._data(), *stack])
        written = self._written()
        undo = [(at, before) for at, before, _ in self._snapshot.changed_lines()]
        self.restore()
        undo.append((free.start, self.machine.memory.read(free.start, len(free))))
        behind = self.all_live if live is None else live(end.met)
        bits = _bits(behind, self.all_live, loose, start._fields)
        return Expected(
            end,
            written,
            bits,
            end.registers and tuple(map(and_, end.registers, bits)),
            memory,
            free,
            [(at, bytes([byte])) for at, byte in written.items() if at in free],
            undo,
        )

    def deviation(self, start: State, expected: Expected) -> str | None:
        """Run the probed piece; return a description of its end, or None if the end equals `expected`."""
        end, memory = self._run(start), self.machine.memory
        if expected.is_met(end, memory):
            for at, data in expected.undo:
                memory.write(at, data)
            return None
        deviation = f"{end}, written {self._written()}, instead of {expected.end}, {expected.written}"
        self.restore()
        return deviation

    def reads_below_stack(self, start: State) -> bool:
        """Return True if the result of a run depends on bytes below the stack pointer, which code reads by an
        invalid index.

        On a real CPU, an interrupt would have overwritten these bytes. Call this only while the region has no
        probe.
        """
        plain = self.run(start)
        self.machine.memory.write(start.sp - _BELOW, b"\xa5" * _BELOW)
        other = self.run(start)
        return plain[:2] != other[:2]

    def _written(self) -> dict[int, int]:
        return {at: byte for at, (_, byte) in self._snapshot.changes().items()}

    def changed(self) -> Pieces:
        """Return the present contents of the memory that differs from the snapshot."""
        return [(at, now) for at, _, now in self._snapshot.changed_lines()]

    def restore(self) -> None:
        """Restore the memory."""
        self._snapshot.restore()


def optimizable(probed: Probed) -> Iterator[tuple[str, int, int]]:
    """Yield (symbol, offset, address) of each probe point of the image that can be optimized."""
    return (place for place in instructions(probed) if is_optimizable(probed, place))


def refused_by_linux(probed: Probed) -> Iterator[tuple[str, int, int]]:
    """Return the places at which only the extended strategy writes a jump."""
    return (place for place in optimizable(probed) if probed.region(place[2]).linux is not None)


def is_optimizable(probed: Probed, place: tuple[str, int, int]) -> bool:
    """Return True if a jump is possible at a place."""
    address = place[2]
    return probed.verdict.may_probe(address) is None and isinstance(
        probed.verdict.optimized_region(address), Region
    )


def instructions(probed: Probed) -> Sequence[Place]:
    """Return (symbol, offset, address) of each instruction that can be probed, except fentry sites."""
    image = probed.kernel.image
    # A prebuilt image is loaded once by all tests, and nothing changes its tables.
    key = probed.kernel.arch.name, frozenset(image.blacklist), frozenset(image.mcount)
    if key not in _INSTRUCTIONS:
        _INSTRUCTIONS[key] = tuple(_find_instructions(probed.kernel))
    return _INSTRUCTIONS[key]


def _find_instructions(kernel: Kernel) -> Iterator[Place]:
    image = kernel.image
    end = image.text_ranges[0].end
    seen = set()
    for symbol in image.kallsyms.symbols:
        if not symbol.is_text or symbol.address in seen or symbol.address + symbol.size > end:
            continue
        seen.add(symbol.address)
        if is_blacklisted(kernel, symbol.address):
            continue
        body = image.read(symbol.address, symbol.size)
        for address in kernel.arch.instruction_boundaries(body, symbol.address):
            if address not in image.mcount:
                yield symbol.name, address - symbol.address, address
