"""The places in which a function keeps its arguments: whenever the CPU is at an instruction, each place that
is reported for it has the argument's value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.entry_values import STACK_WORD, EntryValues
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.config import MachineConfig
from kprobefs.plan.planned_kernel import PlannedKernel, planned_kernel
from tests.kprobes.boundaries import Boundary, all_boundaries
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.functions import Runner
from tests.kprobes.states import build_arena, generate, writable_memory
from tests.sample import share
from tests.snapshot import DataSnapshot

LOW_HALF = 0xFFFF_FFFF


@dataclass
class Activation:
    """A function call that has not returned yet."""

    symbol: Symbol
    start: RegisterSet
    words: list[int]


class Checker(Runner):
    """A runner that executes functions instruction by instruction, and compares each reported place with the
    value at the entry.
    """

    def __init__(
        self, machine: Machine, memory: DataSnapshot, boundaries: list[Boundary], kernel: PlannedKernel
    ) -> None:
        super().__init__(machine, memory, boundaries)
        self._kernel = kernel
        self._values: dict[int, EntryValues] = {}
        self._calls: list[Activation] = []
        self.checked: Counter[str] = Counter()
        self.wrong: list[str] = []

    def _count(self, engine: int, address: int, size: int, data: int) -> None:
        left = self._left
        super()._count(engine, address, size, data)
        # The repetitions of an instruction are counted once, and change its registers.
        if self._left < left:
            self._look(self._machine.regs.snapshot()._replace(ip=address))

    def _counts_of(self, start: RegisterSet) -> Counter[int] | None:
        self._calls = []
        return super()._counts_of(start)

    def _look(self, state: RegisterSet) -> None:
        where = self._machine.image.kallsyms.lookup(state.ip)
        if where is None:
            return
        calls = self._calls
        while calls and state.sp > calls[-1].start.sp:
            calls.pop()
        if not where.offset:
            word = self._machine.model.bits // 8
            words = [self._word(state.sp + (1 + number) * word) for number in range(8)]
            calls.append(Activation(where.symbol, state, words))
        # A stack switch continues another call of the same function.
        is_switch = where.symbol.name in self._kernel.judge.arch.stack_switches
        if calls and calls[-1].symbol == where.symbol and not is_switch:
            self._compare(calls[-1], state)

    def _word(self, at: int) -> int:
        try:
            return int(self._machine.memory.read_word(at))
        except MemoryFault:
            return 0

    def _compare(self, call: Activation, state: RegisterSet) -> None:
        for name, places in self._of(call.symbol).at(state.ip).items():
            number = name.removeprefix(STACK_WORD)
            if number != name and int(number) >= self._stack_parameters(call.symbol):
                # The word belongs to the caller, which may have passed its address to the function.
                continue
            wanted = call.words[int(number)] if number != name else getattr(call.start, name)
            for place in places:
                if place.where.startswith("%"):
                    value = getattr(state, place.where[1:])
                else:
                    word = self._machine.model.bits // 8
                    value = self._word(state.sp + word * int(place.where.removeprefix("$stack")))
                kind = "stack" if place.where.startswith("$") else "register"
                self.checked[f"{kind} half" if place.is_low_half else kind] += 1
                mask = LOW_HALF if place.is_low_half else -1
                if value & mask != wanted & mask:
                    self.wrong.append(f"{call.symbol} {state.ip:#x} {name} {place}")

    def _stack_parameters(self, symbol: Symbol) -> int:
        count = self._kernel.argument_count(symbol.name) or 0
        return count - len(self._kernel.judge.arch.registers.arguments)

    def _of(self, symbol: Symbol) -> EntryValues:
        if symbol.address not in self._values:
            code = self._machine.image.read(symbol.address, symbol.size)
            judge = self._kernel.judge
            self._values[symbol.address] = EntryValues(
                judge.arch,
                code,
                symbol.address,
                self._kernel.ways,
                is_function=True,
                has_jump_table=judge.checker.has_jump_table(symbol),
            )
        return self._values[symbol.address]


@pytest.fixture(params=["x86_64", "i386"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, ram_size=24 << 20), profile=BREAKPOINTS) as kernel:
        yield kernel


def test_told_places_hold_the_entry_values(kernel: Kernel) -> None:
    machine = kernel.machine
    boundaries = all_boundaries(kernel.image)
    arena = build_arena(machine, Random(7), text=False)
    machine.memory.write_word(machine.calls.stack_top, machine.model.layout.host_text)
    planned = planned_kernel(kernel.config.arch, None, None, None)
    checker = Checker(machine, writable_memory(machine, arena), boundaries, planned)
    entries: dict[str, int] = {}
    for boundary in boundaries:
        if boundary.refusal is None:
            entries.setdefault(boundary.function, boundary.addr)
    rng = Random(7)
    top = machine.calls.stack_top
    starts = [generate(arena, rng, entry)._replace(sp=top) for entry in entries.values()]
    checker.counted(share(starts, 3, 12))
    assert not checker.wrong[:5]
    assert checker.checked["register"] > 2000
    assert checker.checked["stack"] > 200
    assert checker.checked["register half"] > 50 or kernel.config.arch == "i386"


@pytest.mark.parametrize(
    ("cold", "kept"),
    [
        ("31ff {jump}", {"si"}),  # xor %edi,%edi
        ("90 {jump}", {"di", "si"}),
        ("31ff 0f0b", {"di", "si"}),
        ("{call} 0f0b", {"di", "si"}),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_a_cold_part_belongs_to_its_function(cold: str, kept: set[str], ends: bool) -> None:
    """After the jump back from a cold part, an argument's place counts only if both paths keep its value.

    A function that ends in a loop does not return.
    """
    start, part, back = 0x1000, 0x2000, 0x1008
    head = bytes.fromhex("85c0 0f84") + (part - back).to_bytes(4, "little", signed=True)
    code = head + bytes.fromhex("90 ebfd" if ends else "90 c3")  # nop; a loop, or ret

    def relative(opcode: str, target: int, at: int) -> str:
        return opcode + (target - at - 5).to_bytes(4, "little", signed=True).hex()

    first = len(bytes.fromhex(cold.partition("{")[0]))
    jump = relative("e9", back, part + first)
    filled = bytes.fromhex(cold.format(jump=jump, call=relative("e8", 0x9000, part)))
    arch = arch_named("x86_64")
    cold_part = [(part, filled)]
    values = EntryValues(arch, code, start, {}, is_function=True, has_jump_table=False, cold=cold_part)
    assert {name for name in ("di", "si") if values.at(back).get(name)} == kept
    assert values.returns is not ends


@pytest.mark.parametrize(
    ("arch", "code", "source", "copy", "is_low_half"),
    [
        ("x86_64", "4889d3", "dx", "bx", False),  # mov %rdx, %rbx
        ("x86_64", "89d3", "dx", "bx", True),  # mov %edx, %ebx
        ("x86_64", "4863da", "dx", "bx", True),  # movslq %edx, %rbx
        ("arm64", "f50302aa", "x2", "x21", False),  # mov x21, x2
        ("arm64", "f503022a", "x2", "x21", True),  # mov w21, w2
        ("arm64", "557c4093", "x2", "x21", True),  # sxtw x21, w2
        ("riscv64", "b289", "a2", "s3", False),  # mv s3, a2
        ("riscv64", "9b090600", "a2", "s3", True),  # sext.w s3, a2
    ],
)
def test_copies_of_parameters_are_followed(
    arch: str, code: str, source: str, copy: str, is_low_half: bool
) -> None:
    """A copy of the lower half is a place of a parameter that has at most 32 bits."""
    text = bytes.fromhex(code)
    padding = {"x86_64": b"\x90", "arm64": bytes.fromhex("1f2003d5"), "riscv64": bytes.fromhex("0100")}[arch]
    values = EntryValues(
        arch_named(arch), text + 4 * padding, 0x1000, {}, is_function=True, has_jump_table=False
    )
    found = {place.where: place.is_low_half for place in values.at(0x1000 + len(text))[source]}
    assert found == {f"%{source}": False, f"%{copy}": is_low_half}


@pytest.mark.parametrize("code", ["f5031faa", "f5031f2a"])
def test_a_zero_is_no_stack_address(code: str) -> None:
    """Number 31 is zero in `mov x21, xzr` and `mov w21, wzr`; elsewhere it is the stack pointer."""
    arch = arch_named("arm64")
    frame = arch.entry_frame(by_interrupt=False)
    ((_, insn),) = arch.frame_insns(bytes.fromhex(code), 0x1000, switches_stack=False)
    insn.effect(frame)
    assert "x21" not in frame.regs
    assert frame.at("sp") is not None
