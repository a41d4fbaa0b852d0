"""Transparency: code runs to the same end unprobed, stepped, boosted, called and optimized."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from emulated_kernel.machine import layout
from emulated_kernel.machine.calls import DataSnapshot
from emulated_kernel.machine.registers import RegisterSet, Regs
from emulated_kernel.machine.traps import GuestFault
from tests.kprobes.optimizer.conftest import Probed

ARITHMETIC = (0x1, 0x4, 0x10, 0x40, 0x80, 0x800)
INTERRUPTS_ON = 0x202
STATES = 3
SCRATCH = 16 << 10
FRAME = 22 * 8
"""Bytes below the stack pointer that a detour uses; nothing of the kernel's lives there at the probe."""
GENERAL = ("ax", "cx", "dx", "bx", "bp", "si", "di", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15")


@dataclass(frozen=True)
class End:
    """How a run ended: its registers, or its fault, and what it wrote."""

    registers: RegisterSet | None
    fault: tuple[int, int, int] | None
    written: dict[int, int]
    dead: range
    """The stack that was free at the start, and may hold anything that the run didn't write."""

    def is_as(self, expected: End) -> bool:
        """Whether this run of a probed piece ended as the unprobed one."""
        theirs = expected.written
        return (
            (self.registers, self.fault) == (expected.registers, expected.fault)
            and all(self.written.get(at) == byte for at, byte in theirs.items())
            and all(at in theirs or at in self.dead for at in self.written)
        )


class Bench:
    """Runs pieces of the image from made-up states; memory is as before after each run."""

    def __init__(self, probed: Probed) -> None:
        self.machine = machine = probed.kernel.machine
        self.scratch = machine.alloc_pages(SCRATCH)
        machine.memory.write(self.scratch, random.Random(7).randbytes(SCRATCH))
        self.sp = machine.calls.stack_top - 512
        # A region may end in `ret`, after any number of pops.
        machine.memory.write(self.sp, layout.HOST_TEXT.to_bytes(8, "little") * 60)
        spans = [(va, size) for va, _, size, rights in machine.image.segments if rights & 2]
        self._snapshot: DataSnapshot = machine.data_snapshot(
            [*spans, (self.scratch, SCRATCH), (self.sp - 2048, 2048 + 512)]
        )

    def states(self, seed: int) -> Iterator[RegisterSet]:
        """Registers that are pointers, numbers and flags of all kinds; the same for a seed."""
        dice = random.Random(seed)
        for _ in range(STATES):
            values = {
                name: dice.choice(
                    (self.scratch + 8 * dice.randrange(512, 1536), dice.randrange(256), dice.getrandbits(64))
                )
                for name in GENERAL
            }
            # A string instruction with a huge count would write where no snapshot is; memcpy takes it of dx.
            values["cx"], values["dx"] = dice.randrange(256), dice.randrange(256)
            flags = INTERRUPTS_ON | sum(flag for flag in ARITHMETIC if dice.random() < 0.5)
            yield RegisterSet(**values, sp=self.sp, flags=flags)

    def run(self, start: RegisterSet, end: int) -> End:
        """From `start` until `end` is reached, or it returns, or faults."""

        def stop(regs: Regs) -> None:
            regs.ip = layout.HOST_TEXT

        breakpoints, text = self.machine.breakpoints, self.machine.text
        before = text.current(end, 1)
        breakpoints[end] = stop
        text.poke(end, b"\xcc")
        registers = fault = None
        try:
            registers = self.machine.execute(start)
        except GuestFault as stopped:
            trap = stopped.trap
            fault = (trap.vector, trap.error_code, trap.cr2)
        finally:
            text.poke(end, before)
            del breakpoints[end]
        written = {at: byte for at, (_, byte) in self._snapshot.changes().items()}
        self._snapshot.restore()
        return End(registers, fault, written, range(start.sp - FRAME, start.sp))


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


def compare(probed: Probed, bench: Bench, place: tuple[str, int, int]) -> list[str]:
    """What differs between the unprobed and the optimized run of a detoured region."""
    symbol, offset, address = place
    length = probed.optimizer._rules.detoured_length(address)
    assert isinstance(length, int)
    starts = [state._replace(ip=address) for state in bench.states(address)]
    expected = [bench.run(start, address + length) for start in starts]
    probe = probed.probe(symbol, offset, at=address)
    probed.settle()
    wrong = []
    if probed.kernel.kprobes.mode(probe) != "optimized":
        wrong.append(f"{symbol}+{offset:#x}: {probed.kernel.kprobes.reason(probe)}")
    probed.hits.clear()
    for start, end in zip(starts, expected, strict=True):
        if not bench.run(start, address + length).is_as(end):
            wrong.append(f"{symbol}+{offset:#x}: {start}")
    if len(probed.hits) != len(starts):
        wrong.append(f"{symbol}+{offset:#x}: {len(probed.hits)} hits of {len(starts)}")
    probed.kernel.unregister_kprobe(probe)
    probed.settle()
    return wrong


@pytest.mark.slow
def test_every_optimizable_point(probed: Probed) -> None:
    """Each detoured region of the image, from states in which it may fault too."""
    bench = Bench(probed)
    places = list(optimizable(probed))
    assert len(places) > 5000
    wrong = [line for place in places for line in compare(probed, bench, place)]
    assert wrong == []
    assert probed.kernel.machine.text.ledger == {}


MODES = {
    "linux-6.1": {"ftrace", "optimized", "int3"},
    "linux-6.1-nopreempt": {"ftrace", "optimized", "boosted", "int3"},
    "kprobes-2010": {"boosted", "int3"},
    "optprobes-2009": {"optimized", "boosted", "int3"},
}


@pytest.mark.parametrize("profile", MODES)
@pytest.mark.parametrize(("function", "arguments"), [("gcd", (1071, 462)), ("int_sqrt", (1000000,))])
def test_whole_functions(
    boot: Callable[[str], Probed], profile: str, function: str, arguments: tuple[int, ...]
) -> None:
    """Every instruction probed alone: the result, and as many hits as the unprobed run has passes."""
    probed = boot(profile)
    kernel = probed.kernel
    machine, start = kernel.machine, probed.address(function)
    found = kernel.image.kallsyms.lookup(start)
    assert found is not None
    expected, seen = machine.call(start, *arguments), set()
    for address in kernel._arch.instruction_boundaries(kernel.image.read(start, found.symbol.size), start):
        counts = []
        probe = probed.probe(function, address - start)
        for settle in (False, True):
            if settle and kernel.kprobes.optimizer is not None:
                probed.settle()
            seen.add(kernel.kprobes.mode(probe))
            probed.hits.clear()
            assert machine.call(start, *arguments) == expected, hex(address)
            counts.append(len(probed.hits))
        assert counts[0] == counts[1], hex(address)
        kernel.unregister_kprobe(probe)
    assert seen == MODES[profile]


@pytest.mark.parametrize("profile", MODES)
def test_a_step_faults_as_the_instruction_does(boot: Callable[[str], Probed], profile: str) -> None:
    """strlen(NULL): the same fault, and the next hit is handled; a boosted copy faults at its own place."""
    probed = boot(profile)
    machine, start = probed.kernel.machine, probed.address("strlen")
    probed.probe("strlen", 5)
    for _ in range(2):
        with pytest.raises(GuestFault) as caught:
            machine.call(start, 0)
        assert (caught.value.trap.vector, caught.value.trap.cr2) == (14, 0)
        if probed.kernel.kprobes.profile.preemption:
            assert caught.value.trap.address == start + 5
    assert len(probed.hits) == 2
