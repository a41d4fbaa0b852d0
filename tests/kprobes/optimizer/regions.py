"""Pieces of the image run from made-up states: what a probed run is compared with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from emulated_kernel.arch.base import Live
from emulated_kernel.arch.x86.liveness import ALL_LIVE
from emulated_kernel.machine.calls import DataSnapshot
from emulated_kernel.machine.registers import RegisterSet, Regs
from tests.kprobes.optimizer.conftest import Probed

ARITHMETIC = (0x1, 0x4, 0x10, 0x40, 0x80, 0x800)
STATUS_FLAGS = sum(ARITHMETIC)
INTERRUPTS_ON = 0x202
STATES = 3
SCRATCH = 16 << 10


@dataclass(frozen=True)
class End:
    """How a run ended: its registers, or its fault, and what it wrote."""

    registers: RegisterSet | None
    fault: tuple[int, int, int] | None
    written: dict[int, int]
    dead: range
    """The stack that was free at the start, and may hold anything that the run didn't write."""
    arrived: bool
    """Behind the piece, not by a return."""

    def is_as(self, expected: End, live: Live = ALL_LIVE) -> bool:
        """Whether this run of a probed piece ended as the unprobed one, in what is live behind the piece."""
        theirs = expected.written
        return (
            (self.arrived, self.fault) == (expected.arrived, expected.fault)
            and self._seen(live) == expected._seen(live)
            and all(self.written.get(at) == byte for at, byte in theirs.items())
            and all(at in theirs or at in self.dead for at in self.written)
        )

    def _seen(self, live: Live) -> RegisterSet | None:
        if self.registers is None or not self.arrived or live is ALL_LIVE:
            return self.registers
        dead = dict.fromkeys(ALL_LIVE.registers - live.registers & {*self.registers._fields}, 0)
        flags = self.registers.flags if live.flags else self.registers.flags & ~STATUS_FLAGS
        return self.registers._replace(**dead, flags=flags)


_BELOW = 2048
"""Bytes below the stack pointer that are put back after each run."""


class Bench:
    """Runs pieces of the image from made-up states; memory is as before after each run."""

    def __init__(self, probed: Probed) -> None:
        self.machine = machine = probed.kernel.machine
        arch = probed.kernel._arch
        self.noise = 64 if arch.bits == 64 else 31
        """Bits of numbers that are no pointers: on i386 wider ones could be."""
        self.general = [name for name in machine.model.registers if name not in ("sp", "ip")]
        self.frame = (len(arch.pt_regs) + 1) * arch.word_size
        """Bytes below the stack pointer that a detour uses; nothing of the kernel's lives there."""
        self.scratch = machine.alloc_pages(SCRATCH)
        machine.memory.write(self.scratch, random.Random(7).randbytes(SCRATCH))
        self.sp = machine.calls.stack_top - 512
        # A region may end in `ret`, after any number of pops.
        pad = machine.model.layout.host_text.to_bytes(arch.word_size, "little")
        machine.memory.write(self.sp, pad * 60)
        self._snapshot: DataSnapshot = machine.data_snapshot(
            [*machine.image_data, (self.scratch, SCRATCH), (self.sp - _BELOW, _BELOW + 512)]
        )

    def states(self, seed: int) -> Iterator[RegisterSet]:
        """Registers that are pointers, numbers and flags of all kinds; the same for a seed."""
        dice = random.Random(seed)
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
            # A string instruction with a huge count would write where no snapshot is; memcpy takes it of dx.
            values["cx"], values["dx"] = dice.randrange(256), dice.randrange(256)
            flags = INTERRUPTS_ON | sum(flag for flag in ARITHMETIC if dice.random() < 0.5)
            yield RegisterSet(**values, sp=self.sp, flags=flags)

    def run(self, start: RegisterSet, end: int, dead: range | None = None) -> End:
        """From `start` until `end` is reached, or it returns, or faults; `dead`: as in End."""

        met = []

        def stop(regs: Regs) -> None:
            met.append(end)
            regs.ip = self.machine.model.layout.host_text

        breakpoints, text = self.machine.breakpoints, self.machine.text
        before = text.current(end, 1)
        breakpoints[end] = stop
        text.poke(end, b"\xcc")
        try:
            trap, state = self.machine.trap_of(start, fixup=True)
        finally:
            text.poke(end, before)
            del breakpoints[end]
        arrived = trap.address == self.machine.model.layout.host_text + 1
        registers = state if arrived else None
        fault = None if arrived else (trap.vector, trap.error_code, trap.cr2)
        written = self.written()
        self.restore()
        return End(registers, fault, written, dead or range(start.sp - self.frame, start.sp), bool(met))

    def reads_below_stack(self, start: RegisterSet, end: int) -> bool:
        """Whether what comes out depends on bytes below the stack pointer: an index gone wild.

        On a real CPU an interrupt would have overwritten them. Not while the region is probed.
        """
        plain = self.run(start, end)
        self.machine.memory.write(start.sp - _BELOW, b"\xa5" * _BELOW)
        other = self.run(start, end)
        return (plain.registers, plain.fault) != (other.registers, other.fault)

    def written(self) -> dict[int, int]:
        """The bytes that differ from the snapshot, as they are now."""
        return {at: byte for at, (_, byte) in self._snapshot.changes().items()}

    def restore(self) -> None:
        self._snapshot.restore()


def optimizable(probed: Probed) -> Iterator[tuple[str, int, int]]:
    """(symbol, offset, address) of every probe point of the image that can be optimized."""
    kernel, rules = probed.kernel, probed.optimizer._rules
    image = kernel.image
    end = image.text_ranges[0].end
    seen = set()
    for symbol in image.kallsyms.symbols:
        if not symbol.is_text or symbol.address in seen or symbol.address + symbol.size > end:
            continue
        seen.add(symbol.address)
        if kernel.kprobes.is_blacklisted(symbol.address):
            continue
        body = image.read(symbol.address, symbol.size)
        for address in kernel._arch.instruction_boundaries(body, symbol.address):
            if address not in image.mcount and isinstance(rules.detoured_length(address), int):
                yield symbol.name, address - symbol.address, address
