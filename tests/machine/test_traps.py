"""Exceptions, breakpoints and budgets: what stops or interrupts the guest, in both register modes."""

from __future__ import annotations

import _thread
import ctypes
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import HOOK_CODE
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.conftest import BREAKPOINTS
from tests.machine.guests import CODE, DATA, HANDLER, LAYOUT, RODATA, TEXT, asm, boot, exceptions

Booter = Callable[..., Machine]
TEXT_ALIAS = LAYOUT.direct_map + 0x1000000
UNMAPPED = 0x123450000


@pytest.fixture(params=[True, False], ids=["fast", "api"])
def start(request: pytest.FixtureRequest) -> Booter:
    return lambda source="", **options: boot(source, fast_registers=request.param, **options)


FAULTS = {
    "divide": ("xor ecx, ecx; div ecx", 2, Vector.DIVIDE_ERROR, 0, None),
    "read unmapped": (f"movabs rbx, {UNMAPPED:#x}; mov rax, [rbx]", 3, Vector.PAGE_FAULT, 0, UNMAPPED),
    "write unmapped": (f"movabs rbx, {UNMAPPED:#x}; mov [rbx], rax", 3, Vector.PAGE_FAULT, 2, UNMAPPED),
    "write rodata": (f"movabs rbx, {RODATA:#x}; mov [rbx], rax", 3, Vector.PAGE_FAULT, 3, RODATA),
    "write text": (f"movabs rbx, {TEXT:#x}; mov [rbx], rax", 3, Vector.PAGE_FAULT, 3, TEXT),
    "write text alias": (f"movabs rbx, {TEXT_ALIAS:#x}; mov [rbx], rax", 3, Vector.PAGE_FAULT, 3, TEXT_ALIAS),
    "non-canonical": (
        "movabs rbx, 0x8000000000000000; mov rax, [rbx]",
        3,
        Vector.GENERAL_PROTECTION,
        0,
        None,
    ),
    "undefined": ("ud2", 2, Vector.INVALID_OPCODE, 0, None),
    "no gate": ("int 0x80", 2, Vector.GENERAL_PROTECTION, 0x80 << 3 | 2, None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_reaches_the_guests_handler(start: Booter, name: str) -> None:
    source, size, vector, error, cr2 = FAULTS[name]
    machine = start(f"{source}; mov r15, 77; hlt")
    machine.memory.write_word(DATA + 8, size)
    sp = machine.regs.sp
    assert machine.run().kind is TrapKind.HYPERCALL
    ((seen_vector, seen_error, seen_ip, seen_cr2),) = exceptions(machine)
    at = CODE + len(asm(source)) - size
    assert (seen_vector, seen_error, seen_ip) == (vector, error, at)
    assert seen_cr2 == (cr2 or 0)
    assert (machine.regs.r15, machine.regs.sp) == (77, sp)


def test_faults_in_a_row_are_no_double_faults(start: Booter) -> None:
    machine = start(
        f"""
        mov r12, 5
        movabs rbx, {UNMAPPED:#x}
        xor ecx, ecx
        loop_start:
        mov rax, [rbx]
        nop
        div rcx
        ud2
        nop
        dec r12
        jnz loop_start
        hlt
        """
    )
    machine.memory.write_word(DATA + 8, 3)
    assert machine.run().kind is TrapKind.HYPERCALL
    row = [Vector.PAGE_FAULT, Vector.DIVIDE_ERROR, Vector.INVALID_OPCODE]
    assert [entry[0] for entry in exceptions(machine)] == row * 5


def test_data_is_not_executable(start: Booter) -> None:
    machine = start(f"movabs rbx, {DATA + 0x1000:#x}; jmp rbx")
    seen: list[Trap] = []

    def to_halt(trap: Trap, regs: Regs) -> bool:
        seen.append(trap)
        regs.ip = TEXT + 10 + 5  # the boot stub's hlt
        return True

    machine.hooks.fault_hooks.append(to_halt)
    machine.memory.write(DATA + 0x1000, b"\xf4")
    assert machine.run().address == TEXT + 16
    (trap,) = seen
    assert (trap.vector, trap.error_code, trap.address) == (Vector.PAGE_FAULT, 0x11, DATA + 0x1000)
    assert trap.cr2 == DATA + 0x1000


def test_unhandled_int3_is_delivered_behind_the_instruction(start: Booter) -> None:
    machine = start("nop; int3; hlt")
    machine.run()
    assert exceptions(machine) == [(Vector.BREAKPOINT, 0, CODE + 2, 0)]


def test_fault_hook_declines_and_the_guest_gets_it(start: Booter) -> None:
    machine = start("ud2; hlt")
    machine.memory.write_word(DATA + 8, 2)
    seen: list[Trap] = []
    machine.hooks.fault_hooks.append(lambda trap, _regs: bool(seen.append(trap)))
    machine.run()
    assert [trap.vector for trap in seen] == [Vector.INVALID_OPCODE]
    assert len(exceptions(machine)) == 1


def test_single_step(start: Booter) -> None:
    machine = start("nop; mov rax, 5; add rax, rax; nop; hlt")
    stops: list[int] = []

    def step(trap: Trap, regs: Regs) -> bool:
        stops.append(trap.address - CODE)
        if len(stops) == 3:
            regs.flags &= ~0x100
        return trap.vector == Vector.DEBUG

    machine.hooks.fault_hooks.append(step)
    machine.regs.flags |= 0x100
    machine.run()
    assert stops == [1, 8, 11]
    assert machine.regs.ax == 10


def test_wild_stack_pointer_is_a_double_fault(start: Booter) -> None:
    machine = start("mov rsp, 0x1000; ud2")
    trap = machine.run()
    assert (trap.kind, trap.vector) == (TrapKind.DOUBLE_FAULT, Vector.INVALID_OPCODE)
    assert machine.regs.ip == trap.address == CODE + 7
    assert machine.run().kind is TrapKind.DOUBLE_FAULT


@pytest.mark.parametrize("target", [TEXT + 0x2000, RODATA + 64, LAYOUT.direct_map + 0x1000000 + 64])
def test_frame_is_never_written_to_read_only_memory(start: Booter, target: int) -> None:
    machine = start(f"movabs rsp, {target:#x}; ud2")
    before = machine.memory.read(target - 64, 64)
    assert machine.run().kind is TrapKind.DOUBLE_FAULT
    assert machine.memory.read(target - 64, 64) == before


def test_handler_that_faults_is_a_double_fault(start: Booter) -> None:
    machine = start("ud2", handler="nop; ud2")
    sp = machine.regs.sp
    trap = machine.run()
    assert (trap.kind, trap.address) == (TrapKind.DOUBLE_FAULT, TEXT + 0x101)
    assert sp - machine.regs.sp <= 8 * 32


def test_without_a_handler_the_run_ends_with_the_fault(start: Booter) -> None:
    machine = start("mov rax, 1; ud2", handler=None)
    trap = machine.run()
    assert (trap.kind, trap.vector, trap.address) == (TrapKind.FAULT, Vector.INVALID_OPCODE, CODE + 7)
    with pytest.raises(HardwareError, match="takes no interrupts"):
        machine.deliver(Vector.WAKE)


def test_host_delivers_an_interrupt_to_the_stopped_guest(start: Booter) -> None:
    machine = start("mov rax, 9; cmp rax, 9; hlt; hlt")
    machine.run()
    regs = machine.regs
    before = regs.snapshot()
    machine.deliver(Vector.WAKE, 4)
    assert regs.ip == TEXT + 0x100
    assert not regs.flags & 0x200
    trap = machine.run()
    assert exceptions(machine) == [(Vector.WAKE, 4, before.ip, 0)]
    assert trap.address == before.ip + 1
    assert regs.snapshot() == before._replace(ip=before.ip + 1)


def test_delivery_to_a_wild_stack_raises(start: Booter) -> None:
    machine = start("nop; hlt")
    machine.run()
    machine.regs.sp = 0x2000
    with pytest.raises(GuestFault) as caught:
        machine.deliver(Vector.WAKE)
    assert caught.value.trap.kind is TrapKind.DOUBLE_FAULT


def test_delivery_clears_and_returns_the_interrupt_flags(start: Booter) -> None:
    machine = start("sti; ud2; hlt", handler="pushfq; pop r14;" + HANDLER)
    machine.memory.write_word(DATA + 8, 2)
    machine.run()
    assert not machine.regs.r14 & 0x200
    assert machine.regs.flags & 0x200


def test_breakpoints_count_exactly(start: Booter) -> None:
    machine = start("mov ecx, 1000; again: nop; nop; dec ecx; jnz again; hlt")
    site = CODE + 6
    hits = 0

    def hit(regs: Regs) -> None:
        nonlocal hits
        hits += 1
        assert regs.ip == site + 1
        assert regs.cx == 1001 - hits

    machine.breakpoints[site] = hit
    machine.text.poke(site, b"\xcc")
    machine.run()
    assert hits == 1000


def test_patching_from_within_a_breakpoint_counts_exactly(start: Booter) -> None:
    """Every pass counts once if an int3 becomes a jump to a counting detour at hit 100, and an int3 again at
    hit 600.
    """
    machine = start(
        f"""
        mov ecx, 1000
        movabs rbx, {DATA + 0x1000:#x}
        again:
        nop
        nop
        nop
        nop
        nop
        dec ecx
        jnz again
        hlt
        """
    )
    site = CODE + 15
    detour = machine.text.alloc_text(64)
    code = asm(
        f"inc qword ptr [rbx]; cmp qword ptr [rbx], 500; jne back; int3; back: jmp {site + 5:#x}",
        detour,
    )
    machine.text.poke(detour, code)
    hits = 0

    def hit(regs: Regs) -> None:
        nonlocal hits
        hits += 1
        if hits == 100:
            machine.text.poke(site, asm(f"jmp {detour:#x}", site))
            regs.ip = site + 5

    def unoptimize(_regs: Regs) -> None:
        machine.text.poke(site, b"\xcc" + machine.text.original(site + 1, 4))

    machine.breakpoints[site] = hit
    machine.breakpoints[detour + code.index(b"\xcc")] = unoptimize
    machine.text.poke(site, b"\xcc")
    machine.run()
    assert machine.memory.read_u64(DATA + 0x1000) == 500
    assert hits == 500
    assert machine.text.ledger == {site: 0x90}


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_exception_in_a_handler_is_raised_outside(
    start: Booter, kind: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    machine = start("nop; nop; mov rax, 3; hlt")

    def fail(_regs: Regs) -> None:
        raise kind("from the handler")

    machine.breakpoints[CODE] = fail
    machine.text.poke(CODE, b"\xcc")
    with pytest.raises(kind, match="from the handler"):
        machine.run()
    assert machine.regs.ip == CODE + 1
    assert machine.regs.ax != 3
    assert machine.run().kind is TrapKind.HYPERCALL
    assert machine.regs.ax == 3
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, whatever program runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(kernel: Kernel, address: int, count: int) -> None:
    """Send SIGINT whenever the guest executes the instruction at `address`, `count` times.

    The hook has no Python code, so Python does not notice the signal until the next callback.
    """
    next_one = partial(next, map(_thread.interrupt_main, [signal.SIGINT] * count), None)
    engine = kernel.machine.hooks.engine
    engine.add_hook(HOOK_CODE, ctypes.CFUNCTYPE(None)(next_one), at=address)
    engine.flush_code()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_an_interrupt_at_a_callbacks_entry_loses_no_hit(arch: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Python raises KeyboardInterrupt before the `try` of a callback, and the hit is handled all the same."""
    seen: list[int] = []
    with Kernel(MachineConfig(arch=arch), profile=BREAKPOINTS) as kernel:
        probe = Kprobe(symbol_name="strlen", pre_handler=lambda *_: seen.append(1))
        kernel.register_kprobe(probe)
        assert kernel.call("strlen", "abc") == 3
        interrupt_at(kernel, probe.address, 1)
        with pytest.raises(KeyboardInterrupt):
            kernel.call("strlen", "abc")
        assert kernel.call("strlen", "abcd") == 4
        assert (len(seen), probe.nmissed) == (3, 0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_comes_with_the_end_of_a_call_that_fails() -> None:
    """KeyboardInterrupt is raised at the end of the call that fails, and not at the end of the next call."""
    with Kernel(MachineConfig(), profile=BREAKPOINTS) as kernel:
        probe = Kprobe(symbol_name="strlen", pre_handler=lambda *_: None)
        kernel.register_kprobe(probe)
        interrupt_at(kernel, probe.address, 1)
        with pytest.raises(KeyboardInterrupt):
            kernel.call("strlen", 16)
        assert kernel.call("strlen", "abc") == 3


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("arch", "offsets"), [("x86_64", (0, 5, 8)), ("riscv64", (0, 8, 12))])
def test_a_second_interrupt_at_a_callbacks_entry_ends_the_run(arch: str, offsets: tuple[int, ...]) -> None:
    seen: list[int] = []

    def note(number: int, *_: object) -> None:
        seen.append(number)

    with Kernel(MachineConfig(arch=arch), profile=BREAKPOINTS) as kernel:
        for number, offset in enumerate(offsets):
            probe = Kprobe(symbol_name="strlen", offset=offset, pre_handler=partial(note, number))
            kernel.register_kprobe(probe)
            interrupt_at(kernel, probe.address, 1)
        with pytest.raises(KeyboardInterrupt):
            kernel.call("strlen", "abc")
        assert seen == [0, 1]


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_ends_a_handler(start: Booter) -> None:
    machine = start("nop; hlt")
    passed: list[int] = []

    def loop(_regs: Regs) -> None:
        for number in range(3):
            passed.append(number)
            signal.raise_signal(signal.SIGINT)

    machine.breakpoints[CODE] = loop
    machine.text.poke(CODE, b"\xcc")
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    assert passed == [0, 1]
    assert machine.run().kind is TrapKind.HYPERCALL


def test_exception_in_the_fault_hook_is_raised_outside(start: Booter) -> None:
    machine = start("ud2; hlt")
    machine.hooks.fault_hooks.append(lambda _trap, _regs: 1 // 0 == 0)
    with pytest.raises(ZeroDivisionError):
        machine.run()
    machine.hooks.fault_hooks.clear()
    machine.memory.write_word(DATA + 8, 2)
    assert machine.run().kind is TrapKind.HYPERCALL


def test_running_from_a_hook_is_refused(start: Booter) -> None:
    machine = start("int3; hlt")
    machine.breakpoints[CODE] = lambda _regs: machine.run() and None
    with pytest.raises(HardwareError, match="runs already"):
        machine.run()
    assert machine.run().kind is TrapKind.HYPERCALL


def test_budget_stops_a_loop_and_running_goes_on(start: Booter) -> None:
    machine = start("again: inc rax; jmp again", run_budget=0.05)
    begun = time.thread_time()
    first = machine.run()
    count = machine.regs.ax
    second = machine.run()
    assert 0.1 <= time.thread_time() - begun < 5
    assert {first.kind, second.kind} == {TrapKind.BUDGET}
    assert machine.regs.ax > count > 1000


def test_budget_of_a_jump_to_itself_leaves_a_deliverable_state(start: Booter) -> None:
    machine = start("here: jmp here; nop; hlt", run_budget=0.05)
    assert machine.run() == Trap(TrapKind.BUDGET, CODE)
    machine.memory.write_word(DATA + 8, 2)
    machine.deliver(Vector.WATCHDOG)
    assert machine.run().kind is TrapKind.HYPERCALL
    assert exceptions(machine) == [(Vector.WATCHDOG, 0, CODE, 0)]


def test_many_short_runs_within_a_budget_are_never_stopped(start: Booter) -> None:
    machine = start(
        "again: mov ecx, 20000; inner: dec ecx; jnz inner; mov eax, 2; hlt; jmp again", run_budget=0.02
    )
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert machine.run().kind is TrapKind.HYPERCALL
