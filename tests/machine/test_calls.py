"""The host's calls of guest functions: they keep complete register states, and memory snapshots and clocks
are exact.
"""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.traps.trap import BudgetExceeded, GuestFault, TrapKind
from emulated_kernel.util.abi import PAGE_SIZE, Hypercall, Prot
from tests.machine import guests
from tests.machine.guests import CLOCK, CODE, DATA, asm, boot
from tests.sample import fewer
from tests.snapshot import data_snapshot

SUM = "lea rax, [rdi+rsi]; add rax, rdx; add rax, rcx; add rax, r8; add rax, r9; ret"


@pytest.mark.parametrize("fast", [True, False])
def test_call_returns_rax_and_leaves_the_guest_as_it_was(fast: bool) -> None:
    machine = boot(SUM, fast_registers=fast)
    machine.regs.flags |= 0x8D5
    before = machine.regs.snapshot()
    assert machine.call(CODE, 1, 20, 300, 4000, 50000, -1) == 54320
    assert machine.regs.snapshot() == before
    with pytest.raises(TypeError):
        machine.call(CODE, *range(7))


@pytest.mark.parametrize("fast", [True, False])
def test_fault_in_a_call(fast: bool) -> None:
    machine = boot("mov rax, [rdi]; ret", fast_registers=fast)
    before = machine.regs.snapshot()
    for _ in range(3):
        with pytest.raises(GuestFault) as caught:
            machine.call(CODE, 0x5000)
        trap = caught.value.trap
        assert (trap.kind, trap.vector, trap.cr2, trap.address) == (TrapKind.FAULT, 14, 0x5000, CODE)
        assert machine.regs.snapshot() == before
    assert machine.memory.read_u64(DATA) == 0


def test_exception_table_is_used() -> None:
    code = asm("mov rax, [rdi]; ret; mov rax, -14; ret")
    fixup = CODE + 4
    machine = boot("mov rax, [rdi]; ret; mov rax, -14; ret", ex_table=[(CODE, fixup)])
    assert code[3] == 0xC3
    machine.memory.write_word(DATA + 64, 99)
    assert machine.call(CODE, DATA + 64) == 99
    assert machine.call(CODE, 0x5000) == (1 << 64) - 14


def test_loop_in_a_call_exceeds_the_budget() -> None:
    machine = boot("here: jmp here", run_budget=0.05)
    before = machine.regs.snapshot()
    with pytest.raises(BudgetExceeded):
        machine.call(CODE)
    assert machine.regs.snapshot() == before


def test_hypercall_in_a_call_is_a_fault() -> None:
    machine = boot("mov eax, 4; hlt; ret")
    with pytest.raises(GuestFault) as caught:
        machine.call(CODE)
    assert caught.value.trap.number == Hypercall.PANIC


def test_exception_of_a_handler_leaves_the_guest_as_it_was() -> None:
    machine = boot("int3; ret")
    before = machine.regs.snapshot()
    machine.breakpoints[CODE] = lambda _regs: 1 // 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        machine.call(CODE)
    assert machine.regs.snapshot() == before


def test_run_delivers_again_after_a_call() -> None:
    machine = boot("ud2; hlt")
    with pytest.raises(GuestFault):
        machine.call(CODE)
    machine.memory.write_word(DATA + 8, 2)
    assert machine.run().kind is TrapKind.HYPERCALL
    assert len(guests.exceptions(machine)) == 1


WORD = st.integers(0, (1 << 64) - 1)
STATE = st.builds(
    RegisterSet, *[WORD] * 4, sp=st.just(0), bp=WORD, si=WORD, di=WORD, r8=WORD, r9=WORD, r10=WORD, r11=WORD,
    r12=WORD, r13=WORD, r14=WORD, r15=WORD, flags=st.integers(0, 0xFFF).map(lambda bits: bits & 0x8D5 | 2),
)  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["fast", "api"])
def caller(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    machine = boot("ret", fast_registers=request.param)
    guests.booted.remove(machine)
    yield machine
    machine.close()


@settings(max_examples=fewer(100, 4))
@given(start=STATE)
def test_complete_state_passes_through(caller, start: RegisterSet) -> None:  # type: ignore[no-untyped-def]
    """All registers and flags are passed to a call and returned exactly. A single ret changes only
    sp and ip.
    """
    start = start._replace(sp=caller.calls.stack_top, ip=CODE)
    end = caller.execute(start)
    assert end._replace(ip=CODE) == start._replace(sp=start.sp + 8)


@settings(max_examples=fewer(100, 4))
@given(a=WORD, b=WORD)
def test_flags_after_arithmetic_are_exact(caller, a: int, b: int) -> None:  # type: ignore[no-untyped-def]
    caller.text.poke(CODE, asm("cmp rdi, rsi; ret"))
    end = caller.execute(RegisterSet(di=a, si=b, sp=caller.calls.stack_top, ip=CODE))
    difference = (a - b) % (1 << 64)
    signs = (a >> 63, b >> 63, difference >> 63)
    assert end.flags & 1 == (a < b)
    assert bool(end.flags & 0x40) == (a == b)
    assert end.flags >> 7 & 1 == signs[2]
    assert bool(end.flags >> 11 & 1) == (signs[0] != signs[1] and signs[2] != signs[0])
    assert end.flags >> 4 & 1 == ((a & 15) < (b & 15))
    assert end.flags >> 2 & 1 == (bin(difference & 0xFF).count("1") % 2 == 0)


def test_data_snapshot() -> None:
    machine = boot("mov [rdi], sil; ret")
    snapshot = data_snapshot(machine, [(DATA, 0x4000)])
    assert snapshot.unchanged()
    top = machine.calls.stack_top
    machine.execute(RegisterSet(ip=CODE, sp=top, di=DATA + 0x1FFF, si=7))
    machine.execute(RegisterSet(ip=CODE, sp=top, di=DATA + 0x30, si=0))
    assert not snapshot.unchanged()
    assert snapshot.changes() == {DATA + 0x1FFF: (0, 7)}
    snapshot.restore()
    assert snapshot.unchanged()
    assert machine.memory.read(DATA + 0x1FFF, 1)[0] == 0


def test_a_snapshot_knows_pages_that_nobody_had_touched() -> None:
    """A snapshot notices and undoes writes to untouched and touched pages: at the start, in the middle and at
    the end.
    """
    machine = boot("ret")
    memory, base, size = machine.memory, 0xFFFF_9000_0000_0000, 150 * PAGE_SIZE
    first = 4 << 20
    memory.map(base, first, size, Prot.READ | Prot.WRITE)
    memory.write(base + 70 * PAGE_SIZE + 5, b"kept")
    snapshot = data_snapshot(machine, [(base + 8, size - 16)])
    assert snapshot.unchanged()
    places = [8, 3 * PAGE_SIZE, 70 * PAGE_SIZE + 6, 80 * PAGE_SIZE, size - 9]
    for place in places:
        memory.write(base + place, b"\1")
        assert not snapshot.unchanged()
        was = b"e"[0] if place == places[2] else 0
        assert snapshot.undo() == {base + place: (was, 1)}
        assert snapshot.unchanged()
    memory.write(base, b"\1")
    memory.write(base + size - 8, b"\1")
    assert snapshot.unchanged()


def test_default_snapshot_covers_data_and_the_call_stack() -> None:
    machine = boot("push rdi; pop rax; ret")
    machine.call(CODE, 1)
    snapshot = data_snapshot(machine)
    machine.execute(RegisterSet(ip=CODE, sp=machine.calls.stack_top, di=0x55))
    assert snapshot.changes() == {machine.calls.stack_top - 8: (1, 0x55)}


def test_virtual_clock_is_a_function_of_the_seed() -> None:
    def times(seed: int) -> list[int]:
        machine = boot("again: nop; hlt; jmp again", seed=seed)
        seen = []
        for _ in range(4):
            machine.run()
            seen.append(machine.memory.read_u64(CLOCK))
        assert machine.clock.now_ns() == seen[-1]
        return [*seen, machine.memory.read_u64(CLOCK + 8)]

    assert times(1) == times(1)
    assert times(1) != times(2)
    assert times(3)[:4] == sorted(times(3)[:4])


def test_clock_never_goes_behind_what_the_guest_has_read() -> None:
    machine = boot("again: nop; hlt; jmp again", clock="real")
    machine.run()
    ahead = machine.memory.read_u64(CLOCK) + 10**12
    machine.memory.write_word(CLOCK, ahead)
    machine.run()
    assert machine.memory.read_u64(CLOCK) >= ahead
    assert machine.clock.now_ns() >= ahead
    with pytest.raises(ValueError, match="sundial"):
        boot(clock="sundial")


def test_a_quantum_has_instructions() -> None:
    with pytest.raises(ValueError, match="a quantum of -1 instructions"):
        boot("hlt", quantum=-1)


def test_other_threads_run_while_the_guest_runs() -> None:
    machine = boot("here: jmp here", run_budget=0.2)
    counted = 0
    done = threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            done.wait(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    most = 0
    # On a busy host, a thread may sleep for longer than it wanted to.
    for _ in range(10):
        before = counted
        assert machine.run().kind is TrapKind.BUDGET
        most = max(most, counted - before)
        if most > 20:
            break
    done.set()
    thread.join()
    assert most > 20
