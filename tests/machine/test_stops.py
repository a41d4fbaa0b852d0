"""Stops of a run by another thread: the run goes on without an effect of the stop, or the guest is
given up.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.native.host_code import PYTHON_TRAPS
from emulated_kernel.machine.quirks.harness import CODE_OFFSET
from emulated_kernel.machine.traps.trap import TrapKind
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from tests.guests.builtin.test_dead_guest import read_text
from tests.machine.guests import CODE, DATA, boot

ROUNDS = 300_000
STOPS = 2000
CELLS = (0, 8, 24)
"""Offsets from the base register of the words to which a round adds 1."""
X86_64 = bytes.fromhex("51 59 f048ff03 48ff4308 ba01000000 f0480fc15318 48ffc9")
"""Machine code of a round: push, pop, lock inc [rbx], inc [rbx+8], lock xadd [rbx+24], 1, dec rcx."""
I386 = bytes.fromhex("51 59 f0ff03 ff4308 ba01000000 f00fc15318 49")
RISCV = struct.pack(
    "<8I",
    *(0x00053303, 0x00130313, 0x00653023),  # ld t1, 0(a0); addi t1, t1, 1; sd t1, 0(a0)
    *(0x00853303, 0x00130313, 0x00653423),  # the same at 8(a0)
    *(0x005633AF, 0xFFF58593),  # amoadd.d t2, t0, (a2); addi a1, a1, -1
)
LOOPS = {
    "x86_64": (X86_64 + b"\x0f\x85" + struct.pack("<i", -len(X86_64) - 6), "bx", "cx"),
    "i386": (I386 + b"\x0f\x85" + struct.pack("<i", -len(I386) - 6), "bx", "cx"),
    # bnez a1, .-32
    "riscv64": (RISCV + struct.pack("<I", 0xFE0590E3), "a0", "a1"),
}


@pytest.fixture
def stopping() -> Iterator[list[threading.Event]]:
    """Yield a list for events that end the threads which a test has started."""
    ends: list[threading.Event] = []
    yield ends
    for end in ends:
        end.set()


@pytest.mark.parametrize("arch", LOOPS)
def test_a_run_that_is_stopped_anywhere_does_nothing_twice(
    arch: str, stopping: list[threading.Event]
) -> None:
    code, base, counter = LOOPS[arch]
    with Kernel(MachineConfig(arch=arch)) as kernel:
        machine, engine = kernel.machine, kernel.machine._engine
        va = machine.model.layout.host_text + CODE_OFFSET
        at = machine.memory.translate(va)
        code += machine.model.halt
        machine.memory.ram[at : at + len(code)] = code
        engine.flush_code()
        cells = machine.alloc_pages(4096)
        end = threading.Event()
        stopping.append(end)

        def stop() -> None:
            while not end.wait(0.0001):
                engine.stop()

        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        rounds = stops = 0
        sp = machine.calls.stack_top
        try:
            while stops < STOPS:
                rounds += ROUNDS
                machine.regs.set(base, cells)
                machine.regs.set(counter, ROUNDS)
                if arch == "riscv64":
                    machine.regs.set("a2", cells + 24)
                    machine.regs.set("t0", 1)
                machine.regs.sp, machine.regs.ip = sp, va
                while machine.regs.ip != va + len(code):
                    assert engine.start(machine.regs.ip) == 0
                    stops += 1
                assert machine.regs.sp == sp
        finally:
            # Also after a failure: a stop of a closed engine would end the process.
            end.set()
            thread.join()
        size = machine.memory.word_size
        counts = [int.from_bytes(machine.memory.read(cells + cell, size), "little") for cell in CELLS]
        assert counts == [rounds] * len(CELLS)


def test_where_stops_are_inexact_the_guest_is_given_up() -> None:
    with Kernel(MachineConfig(run_budget=0.05)) as kernel:
        kernel.machine._engine.stop_between_blocks(False)
        with pytest.raises(KernelError) as caught:
            kernel.call("_raw_spin_lock", b"held")
        assert caught.value.errno == errno.EFAULT
        assert kernel.guest.is_dead
        log = read_text(kernel.mount(), "/machine/dmesg")
        assert "kprobefs: the guest was given up: it looped at 0x" in log.splitlines()[-1]
        assert log.endswith(", and was stopped within an instruction\n")


def test_a_quantum_stops_in_front_of_an_instruction() -> None:
    """If a run has a quantum, its budget also stops the run between instructions, not in the middle of an
    instruction's effects.
    """
    machine = boot("again: inc qword ptr [rbx]; inc rcx; jmp again", run_budget=0.02, quantum=10**9)
    assert machine.stops_exactly
    machine.regs.bx, machine.regs.cx = DATA, 0
    for _ in range(20):
        trap = machine.run()
        assert trap.kind is TrapKind.BUDGET
        assert machine.memory.read_u64(DATA) - machine.regs.cx == (trap.address == CODE + 3)


def _ends_of_quanta() -> list[int]:
    """Return the addresses at which 200 runs of a loop end.

    Most runs end after a quantum, some of them with a delay. Every fifth run ends at the end of a range of
    code.
    """
    machine = boot("again: inc rcx; nop; nop; nop; nop; inc rdx; jmp again", quantum=3, seed=7)
    asked = 0

    def may_end() -> bool:
        nonlocal asked
        asked += 1
        return asked % 4 != 0

    machine.preempt_if(may_end)
    ends = []
    for number in range(200):
        if number % 5 == 0:
            machine.leave(range(CODE, CODE + 6).__contains__)
        else:
            if number % 5 == 1:
                machine.finish_interrupt(CODE + number % 7)
            assert machine.run().kind is TrapKind.PREEMPTED
        ends.append(machine.regs.ip)
    assert asked > 200
    return ends


def test_python_counts_the_instructions_of_a_quantum_as_the_routine_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PYTHON_TRAPS, raising=False)
    ends = _ends_of_quanta()
    assert len(set(ends)) == 7
    monkeypatch.setenv(PYTHON_TRAPS, "1")
    assert _ends_of_quanta() == ends


def test_the_clients_requests_go_on_behind_a_loop() -> None:
    """Requests of clients still work after calls that loop forever were stopped."""
    with Kernel(MachineConfig(run_budget=0.02)) as kernel:
        mount, client = kernel.mount(), Client(500, 0, 0)
        mount.mkdir(client, "/scratch/d", 0o755)
        for _ in range(20):
            with pytest.raises(KernelError):
                kernel.call("_raw_spin_lock", b"held")
        assert not kernel.guest.is_dead
        assert [entry.name for entry in mount.readdir("/scratch/d")] == [".", ".."]


HITS = 30
"""Number of hits. Four times as many, and the hits that compile the code, fit on one page of records."""


def _taken(kernel: Kernel, watched: bool) -> tuple[int, int]:
    """Return the guest instructions and the traps of HITS hits. `watched`: whether the watchdog is used."""
    machine, counted, met = kernel.machine, 0, 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    def trap(handler: Callable[[Regs], object], regs: Regs) -> None:
        nonlocal met
        met += 1
        handler(regs)

    handlers = dict(machine.breakpoints)
    watchdog = machine._runner.watchdog
    with pytest.MonkeyPatch.context() as patch:
        if not watched:
            patch.setattr(watchdog, "arm", lambda _budget=None: None)
            patch.setattr(watchdog, "disarm", lambda: False)
        engine = machine._engine
        hook = engine.add_hook(HOOK_CODE, CODE_CALLBACK(count))
        engine.flush_code()
        machine.breakpoints.update({at: partial(trap, handler) for at, handler in handlers.items()})
        for number in range(HITS):
            kernel.call("int_sqrt", number)
        machine.breakpoints.update(handlers)
        engine._check(engine._held.uc_hook_del(engine.handle, hook), "uc_hook_del")
        engine.flush_code()
    return counted, met


@pytest.mark.parametrize("mode", ["optimized", "int3"])
def test_that_runs_can_be_stopped_costs_no_hit_anything(mode: str) -> None:
    """Neither the watchdog nor exact stops cost a hit an instruction or a trap."""
    profile = Profile("hits", ftrace=False, optimizer=mode == "optimized")
    with Kernel(MachineConfig(), profile=profile) as kernel:
        assert kernel.machine.stops_exactly
        kernel.tracing.kprobe_events.write(b"p:hit int_sqrt+5 x=%di\n")
        event = kernel.tracing.kprobe_events.probes()[-1].event
        kernel.trace.expand()
        event.enable(kernel.trace)
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.flush()
        for number in range(3):
            kernel.call("int_sqrt", number)
        found = set()
        for exact in (True, False):
            kernel.machine._engine.stop_between_blocks(exact)
            found |= {_taken(kernel, watched) for watched in (True, False)}
        assert len(found) == 1, found
        [(instructions, traps)] = found
        assert event.probes[0].hits == 3 + 4 * HITS
        assert instructions > 20 * HITS
        assert traps < 2 * HITS or mode == "int3"
