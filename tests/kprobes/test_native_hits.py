"""Hits that guest code and the host's native routine handle: how often Python is entered, and that the
effects are the same as with Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest

from emulated_kernel.arch.program.ir_builder import EntryKind
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.hit.handling import stub_traps
from emulated_kernel.kprobes.kinds.hit_ring import HitRing
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, Stepper, TrampolineForm
from emulated_kernel.machine.native import host_code
from emulated_kernel.machine.traps.trap import TrapKind
from emulated_kernel.trace.probes import handler_cost
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.config import MachineConfig
from kprobefs.measure.bench import FUNCTION, Loop, caller, loop_of_calls
from tests.kprobes.boundaries import verdict
from tests.kprobes.optimizer.test_in_kernel import Files
from tests.kprobes.test_assembly import TEXTS, settle
from tests.ledger import ledger_mismatches
from tests.sample import fewer

pytestmark = pytest.mark.skipif(
    host_code.routine_address("x86") is None, reason="there is no routine for this kind of host"
)
PLAIN = Profile("plain", ftrace=False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT)
MODES = {
    "stepped": (PLAIN, 2),
    "trap flag": (replace(PLAIN, stepper=Stepper.TRAP_FLAG), 2),
    "boosted": (replace(PLAIN, preemption=False), 1),
}
"""Mode -> profile, and traps of a hit."""
ARCHITECTURES = ("x86_64", "i386", "riscv64", "riscv64i")
CASES = [
    (arch, mode) for arch in ARCHITECTURES for mode in MODES if arch in ARCHITECTURES[:2] or mode == "stepped"
]
MANY = fewer(1_000_000, 4)
CALL = b"\xe8"


@contextmanager
def counted_entries(kernel: Kernel) -> Iterator[list[str]]:
    """Yield a list that gets the name of each callback by which the emulator enters Python."""
    codes = kernel.machine.handler_time.callbacks
    entered: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


@contextmanager
def booted(arch: str, mode: str, **options: Any) -> Iterator[Kernel]:
    profile, _ = MODES[mode]
    with Kernel(MachineConfig(arch=arch, run_budget=60, **options), profile=profile) as kernel, kernel.lock:
        assert kernel.machine.hooks.is_native
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


def recording(kernel: Kernel) -> HitRing:
    ring = kernel.hit_ring(*kernel.arch.registers.arguments[:2])
    kernel.register_kprobe(ring.probe(symbol_name=FUNCTION, offset=kernel.arch.call_size))
    return ring


def two_at_once(kernel: Kernel) -> HitRing:
    ring = recording(kernel)
    other = ring.probe(symbol_name=FUNCTION, offset=kernel.arch.call_size)
    kernel.register_kprobe(other)
    return ring


def returning(kernel: Kernel) -> HitRing:
    result = kernel.arch.registers.return_value
    ring = kernel.hit_ring(result)
    kernel.register_kretprobe(ring.return_probe(symbol_name=FUNCTION))
    return ring


def on_each_cpu(kernel: Kernel, run: Callable[[], object]) -> None:
    for number in range(kernel.config.cpus):
        kernel.machine.switch_to(number)
        run()
    kernel.machine.switch_to(0)


@pytest.mark.parametrize("cpus", [1, 2])
@pytest.mark.parametrize(("kind", "records"), [(recording, 1), (two_at_once, 2), (returning, 1)])
@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_no_hit_of_many_enters_python(
    arch: str, mode: str, kind: Callable[[Kernel], HitRing], records: int, cpus: int
) -> None:
    with booted(arch, mode, cpus=cpus) as kernel:
        ring = kind(kernel)
        warm_up, run = caller(kernel, 5), caller(kernel, MANY // cpus)
        on_each_cpu(kernel, warm_up)
        hits, native = ring.hits, kernel.machine.hooks.native_traps
        with counted_entries(kernel) as entered:
            on_each_cpu(kernel, run)
        assert entered == []
        assert ring.hits - hits == records * MANY
        traps = MODES[mode][1] + (kind is returning)
        assert kernel.machine.hooks.native_traps - native == traps * MANY


EMULATED = {"x86_64": [1, 1], "i386": [1, 1], "riscv64": [2, 2, 2, 2, 1], "riscv64i": [2, 2, 2, 2, 1]}
"""Architecture -> traps of a hit on each emulated instruction of FUNCTION.

On x86 these are a conditional jump and a return. On RISC-V these are auipc and jalr of a call, two branches,
and a return.
"""


@pytest.mark.parametrize("cpus", [1, 2])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_hit_on_an_emulated_instruction_enters_python(arch: str, cpus: int) -> None:
    """No hit on an emulated instruction enters Python, because the handler's code ends with a relocated form
    of the instruction.

    If the way back needs a register, it is a second trap instead of a jump.
    """
    turns = 100_000 // cpus
    with booted(arch, "stepped", cpus=cpus) as kernel:
        traps = []
        for offset in boundaries(kernel, FUNCTION):
            ring = kernel.hit_ring(kernel.arch.registers.sp)
            probe = ring.probe(symbol_name=FUNCTION, offset=offset)
            kernel.register_kprobe(probe)
            head = kernel.kprobes.table.valid(probe)
            assert head is not None
            if head.insn is not None and head.insn.slot is None:
                on_each_cpu(kernel, caller(kernel, 5))
                before, native = ring.hits, kernel.machine.hooks.native_traps
                run = caller(kernel, turns)
                with counted_entries(kernel) as entered:
                    on_each_cpu(kernel, run)
                assert entered == []
                hits = ring.hits - before
                assert hits % turns == 0
                assert hits >= turns * cpus
                assert head.stub is not None
                assert (kernel.machine.hooks.native_traps - native) % hits == 0
                traps.append((kernel.machine.hooks.native_traps - native) // hits)
                assert stub_traps(head, head.stub) == traps[-1]
            kernel.unregister_kprobe(probe)
        assert traps == EMULATED[arch]
        settle(kernel)
        kernel.kprobes.garbage.collect()
        assert not kernel.kprobes.compiler.codes


@pytest.mark.parametrize("arch", ["riscv64", "riscv64i"])
def test_a_breakpoint_leads_to_a_slot_that_no_jump_reaches(arch: str) -> None:
    """A slot out of reach of a `jal` (1 MiB) costs a third trap per hit.

    This trap does not enter Python either, and the hit's cost is not measured.
    """
    with booted(arch, "stepped") as kernel:
        files = Files(kernel)
        files.write("/kprobe_events", f"p:ev {FUNCTION}+{kernel.arch.call_size}")
        files.write("/tracing/events/kprobes/ev/enable", "1")
        filled = kernel.machine.text.alloc_text(1 << 20)
        caller(kernel, 5)()
        native, run = kernel.machine.hooks.native_traps, caller(kernel, 1000)
        with counted_entries(kernel) as entered:
            run()
        assert len(entered) <= 1, "the first page is Python's"
        assert kernel.machine.hooks.native_traps - native == 3000
        assert files.read("/kprobes/stats/kprobes/ev/cost") == "hits 1005, 3 traps\n"
        files.write("/tracing/events/kprobes/ev/enable", "0")
        kernel.machine.text.free_text(filled)


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_a_task_in_a_relocated_call_has_called(arch: str) -> None:
    """A call instruction is relocated as a push of the return address and a jump.

    A task at the jump counts as being in the call.
    """
    with booted(arch, "stepped") as kernel:
        start = kernel.image.kallsyms.lookup_name("vfs_read")
        assert start is not None
        text = kernel.machine.text
        at = next(
            start + each for each in boundaries(kernel, "vfs_read") if text.original(start + each, 1) == CALL
        )
        ring = kernel.hit_ring(kernel.arch.registers.sp)
        probe = ring.probe(addr=at)
        kernel.register_kprobe(probe)
        head = kernel.kprobes.table.valid(probe)
        assert head is not None
        assert kernel.kprobes.routes.compile_stub(head)
        assert head.stub is not None
        code = text.current(head.stub.copied, head.stub.address + head.stub.size - head.stub.copied)
        push, jump, *_ = kernel.arch.instruction_boundaries(code, head.stub.copied)
        places = [kernel.kprobes.resolve_probed_address(each) for each in (push, jump)]
        word = kernel.arch.word_size
        assert [(it.address, it.pushed, it.is_calling) for it in places if it is not None] == [
            (at, 0, False),
            (at, word, True),
        ]


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_the_file_cost_measures_the_traps_of_a_hit(arch: str, mode: str) -> None:
    """The file `cost` shows the number of traps that a hit takes.

    To measure this, `cost` makes hits of a copy, and each of these takes the same number of traps.
    """
    with booted(arch, mode) as kernel:
        files = Files(kernel)
        files.write("/kprobe_events", f"p:ev {FUNCTION}+{kernel.arch.call_size}")
        files.write("/tracing/events/kprobes/ev/enable", "1")
        caller(kernel, 5)()
        hooks = kernel.machine.hooks
        before, run = hooks.native_traps, caller(kernel, 10)
        with counted_entries(kernel) as entered:
            run()
        traps = (hooks.native_traps - before + len(entered)) // 10
        assert traps == MODES[mode][1]
        for hits in (15, 25):
            before = hooks.native_traps
            text = files.read("/kprobes/stats/kprobes/ev/cost")
            measured = hooks.native_traps - before
            found = re.fullmatch(r"hits (\d+) median ([\d.]+) ns, (\d) traps?\n", text)
            assert found is not None, text
            assert (int(found[1]), int(found[3])) == (hits, traps)
            assert float(found[2]) > 0
            assert measured == traps * handler_cost.ROUNDS * handler_cost.HITS[EntryKind.BREAKPOINT]
            run()


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_a_trace_event_enters_python_for_the_first_page_only(arch: str, mode: str) -> None:
    with booted(arch, mode) as kernel:
        kernel.tracing.kprobe_events.write(f"p:ev {FUNCTION}+{kernel.arch.call_size}\n".encode())
        [event] = kernel.tracing.kprobe_events.events()
        kernel.trace.expand()
        event.enable(kernel.trace)
        caller(kernel, 5)()
        with counted_entries(kernel) as entered:
            caller(kernel, 100_000)()
        assert len(entered) <= 1
        assert event.probes[0].hits == 100_005
        assert kernel.trace.buffers[0].written == 100_005


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
@pytest.mark.parametrize("argument", ["", '\\"string"'])
def test_pages_that_guest_code_fills_are_equal_to_those_of_the_host(arch: str, argument: str) -> None:
    """Pages of the ring that guest code fills equal those that the host fills.

    Two CPUs record into two trace arrays, and one of the arrays keeps its oldest events.
    """
    found = []
    for turns_pages in (False, True):
        with booted(arch, "stepped", cpus=2) as kernel:
            records = kernel.tracing.guest_records
            if not turns_pages:
                records._compile_next_page = lambda _request: None
            kernel.tracing.kprobe_events.write(
                f"p:ev {FUNCTION}+{kernel.arch.call_size} {argument}\n".encode()
            )
            [event] = kernel.tracing.kprobe_events.events()
            arrays = [kernel.trace, kernel.tracing.arrays.make("other").array]
            arrays[1].options.set("overwrite", 0)
            for array in arrays:
                event.enable(array)
            on_each_cpu(kernel, caller(kernel, 5))
            with counted_entries(kernel) as entered:
                on_each_cpu(kernel, caller(kernel, 3000))
            buffers = [buffer for array in arrays for buffer in array.buffers]
            assert (entered == []) is turns_pages
            found.append([(buffer.stats(), list(buffer)) for buffer in buffers])
    assert found[0] == found[1]


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_assembly_on_both_sides_stays_in_the_guest(arch: str, mode: str) -> None:
    """A probe with `post_code` is stepped, and the trap at the end of the step leads to this code without
    Python.
    """
    texts = TEXTS[arch]
    with booted(arch, mode) as kernel:
        probe = Kprobe(
            symbol_name=FUNCTION, offset=kernel.arch.call_size, code=texts.count, post_code=texts.count
        )
        kernel.register_kprobe(probe)
        caller(kernel, 5)()
        with counted_entries(kernel) as entered:
            caller(kernel, 10_000)()
        assert entered == []
        [cell] = probe.cells.values()
        assert (cell, probe.nmissed) == (2 * 10_005, 0)
        native = kernel.machine.hooks.native_traps
        kernel.unregister_kprobe(probe)
        settle(kernel)
        kernel.kprobes.garbage.collect()
        caller(kernel, 5)()
        assert kernel.machine.hooks.native_traps == native
        assert not kernel.kprobes.compiler.codes


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_a_handler_in_python_beside_native_hits_misses_none(arch: str, mode: str) -> None:
    """If a handler in Python and native hits share a function, no hit is missed.

    A native single step leaves no state behind that would make a later hit look like a nested one.
    """
    with booted(arch, mode) as kernel:
        ring = recording(kernel)
        seen: list[bool] = []
        probe = Kprobe(symbol_name=FUNCTION, pre_handler=lambda _kprobe, _regs: seen.append(True))
        kernel.register_kprobe(probe)
        caller(kernel, 1000)()
        assert (ring.hits, len(seen), probe.nmissed) == (1000, 1000, 0)
        assert kernel.machine.hooks.native_traps > 900
        assert kernel.kprobes.hits.may_interrupt()


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_a_handler_in_python_is_one_entry_into_python(arch: str, mode: str) -> None:
    """A hit with a pre-handler in Python enters Python once.

    The hit's single step ends in the guest, unless a post-handler in Python follows.
    """
    with booted(arch, mode) as kernel:
        seen: list[str] = []
        probe = Kprobe(
            symbol_name=FUNCTION,
            offset=kernel.arch.call_size,
            pre_handler=lambda _kprobe, _regs: seen.append("pre"),
        )
        after = Kprobe(
            symbol_name=FUNCTION,
            offset=kernel.arch.call_size,
            post_handler=lambda _kprobe, _regs: seen.append("post"),
        )
        kernel.register_kprobe(probe)
        caller(kernel, 1)()
        for handlers, traps in ((["pre"], 1), (["pre", "post"], 2), (["pre"], 1)):
            if len(handlers) == 2:
                kernel.register_kprobe(after)
            elif after.addr is not None:
                kernel.unregister_kprobe(after)
            caller(kernel, 1)()
            seen.clear()
            with counted_entries(kernel) as entered:
                caller(kernel, 100)()
            assert len(entered) == 100 * traps
            assert seen == handlers * 100
        assert (probe.nmissed, after.nmissed) == (0, 0)
        assert kernel.kprobes.hits.may_interrupt()


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_a_step_after_a_handler_in_python_has_no_state(arch: str, mode: str) -> None:
    """While one CPU is in the single step after a handler in Python, hits of the same probe on another CPU
    are not missed.
    """
    with booted(arch, mode, quantum=5, cpus=2) as kernel:
        machine = kernel.machine
        hits = kernel.kprobes.hits
        seen: list[int] = []
        probe = Kprobe(
            symbol_name=FUNCTION,
            offset=kernel.arch.call_size,
            pre_handler=lambda _kprobe, _regs: seen.append(machine.cpu),
        )
        kernel.register_kprobe(probe)
        loops = [PreemptedLoop(kernel) for _ in range(2)]
        for number, loop in enumerate(loops):
            machine.switch_to(number)
            loop.start(200 + number, apart=True)
        going = [True, True]
        steps = 0
        while any(going):
            for number, loop in enumerate(loops):
                machine.switch_to(number)
                going[number] = going[number] and loop.preempted()
                is_within = hits.steps.at(machine.regs.ip) is not None
                steps += is_within
                assert hits.ctlblk.running is None
                assert hits.may_interrupt() is not is_within
        machine.switch_to(0)
        assert (seen.count(0), seen.count(1), probe.nmissed) == (200, 201, 0)
        assert (steps > 0) is (mode != "boosted")


def test_while_python_has_a_cpu_hits_are_missed_in_python() -> None:
    """While the hit of a handler in Python lasts, other hits of its CPU are missed.

    Python handles these, not the native routine.
    """
    with booted("x86_64", "stepped") as kernel:
        ring = recording(kernel)
        caller(kernel, 5)()
        native = kernel.machine.hooks.native_traps
        ctlblk = kernel.kprobes.hits.ctlblk
        other = Kprobe(symbol_name="gcd", pre_handler=lambda *_: None)
        kernel.register_kprobe(other)
        ctlblk.set_running(kernel.kprobes.table.valid(other))
        caller(kernel, 10)()
        ctlblk.set_running(None)
        assert (ring.hits, kernel.machine.hooks.native_traps) == (5, native)
        caller(kernel, 10)()
        assert (ring.hits, kernel.machine.hooks.native_traps) == (15, native + 20)


# Preemption


class PreemptedLoop:
    """A loop of calls that the machine runs with preemptions."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._loops: dict[int, Loop] = {}

    def start(self, turns: int, *, apart: bool = False) -> None:
        """Put the current CPU at the start of a loop; `apart`: on a stack that no other loop uses."""
        machine = self._kernel.machine
        stack_top = machine.alloc_pages(2 * PAGE_SIZE) + PAGE_SIZE if apart else machine.calls.stack_top
        if turns not in self._loops:
            self._loops[turns] = loop_of_calls(self._kernel, turns)
        code, begin = self._loops[turns]
        begin()
        start = machine.regs.snapshot()._replace(ip=code, sp=stack_top)
        machine.regs.restore(machine.model.as_called(machine.memory, start, machine.calls._return_pad))

    def preempted(self) -> bool:
        """Run until a preemption and return True; return False at the end of the loop."""
        machine = self._kernel.machine
        trap = machine.run()
        if trap.kind is TrapKind.PREEMPTED:
            return True
        assert trap.kind is TrapKind.HYPERCALL
        assert trap.address == machine.calls._return_pad + len(machine.model.halt)
        return False


def positions(kernel: Kernel, turns: int) -> list[tuple[int, int]]:
    """Return (ip, sp) of each preemption in a loop."""
    loop = PreemptedLoop(kernel)
    loop.start(turns)
    found = []
    while loop.preempted():
        found.append((kernel.machine.regs.ip, kernel.machine.regs.sp))
    return found


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_preemptions_come_at_the_same_places(arch: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host's routine and with Python, the guest is preempted after the same instructions."""
    found = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(host_code, "ROUTINES", {})
        profile, _ = MODES[mode]
        config = MachineConfig(arch=arch, run_budget=60, quantum=5, cpus=2)
        with Kernel(config, profile=profile) as kernel, kernel.lock:
            assert kernel.machine.hooks.is_native is native
            ring = recording(kernel)
            found.append(positions(kernel, 300))
            assert ring.hits == 300
    assert found[0] == found[1]
    assert len(found[0]) > 300


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_a_probe_goes_while_a_cpu_is_anywhere_in_its_hit(arch: str, mode: str) -> None:
    """A probe can be unregistered while a CPU is anywhere in its hit.

    The CPU completes the step, even if new probes take free slots.
    """
    places: set[str] = set()
    with booted(arch, mode, quantum=3, cpus=2) as kernel:
        machine = kernel.machine
        hits = kernel.kprobes.hits
        ring = kernel.hit_ring(*kernel.arch.registers.arguments[:2])
        loop = PreemptedLoop(kernel)
        others = [Kprobe(symbol_name="gcd", offset=offset) for offset in boundaries(kernel, "gcd")[:3]]
        for number in range(80):
            probe = ring.probe(symbol_name=FUNCTION, offset=kernel.arch.call_size)
            kernel.register_kprobe(probe)
            loop.start(2)
            while loop.preempted():
                pass
            head = kernel.kprobes.table.valid(probe)
            assert head is not None
            stub = head.stub
            assert stub is not None
            loop.start(1)
            before = ring.hits
            preempted = all(loop.preempted() for _ in range(number % 10 + 1))
            ip = machine.regs.ip
            within = {"stub": stub.contains(ip), "slot": hits.steps.at(ip) is not None}
            places |= {name for name, is_there in within.items() if is_there}
            assert hits.may_interrupt() is not any(within.values())
            kernel.unregister_kprobe(probe)
            kernel.kprobes.garbage.collect()
            # The other probes take the free slots.
            kernel.register_kprobes(others)
            while preempted and loop.preempted():
                pass
            assert ring.hits - before in (0, 1)
            assert ring.hits > before or not any(within.values())
            kernel.unregister_kprobes(others)
            kernel.kprobes.garbage.collect()
    assert places == {"stub", "slot"} - ({"slot"} if mode == "boosted" else set())


def boundaries(kernel: Kernel, name: str) -> list[int]:
    """Return the offsets of the instructions of the function `name` that can be probed, except the first
    one.
    """
    start = kernel.image.kallsyms.lookup_name(name)
    assert start is not None
    where = kernel.image.kallsyms.lookup(start)
    assert where is not None
    checks = kernel.kprobes.probe_checker.check_each_insn(where.symbol)
    return [address - start for address, refused, _ in checks if refused is None][1:]


# Other ways of a native hit


@pytest.mark.parametrize(("arch", "mode"), CASES)
def test_a_fault_in_a_native_step_is_the_probed_instructions(arch: str, mode: str) -> None:
    """The fixup of a fault in a native single step is found by the probed address.

    After the fault, the CPU is not in a hit.
    """
    with booted(arch, mode) as kernel:
        copy = kernel.image.kallsyms.lookup_name("_copy_from_user")
        assert copy is not None
        ring = kernel.hit_ring(kernel.arch.registers.sp)
        for at, _ in kernel.image.ex_table:
            if verdict(kernel.kprobes, at) == 0:
                kernel.register_kprobe(ring.probe(addr=at))
        area = kernel.machine.alloc_pages(4096)
        # No user memory is mapped at 0x1000, and so no byte is copied.
        assert {kernel.machine.call(copy, area, 0x1000, 64) for _ in range(5)} == {64}
        assert ring.hits
        assert kernel.machine.hooks.native_traps
        assert kernel.kprobes.hits.may_interrupt()


def test_a_string_instruction_is_one_hit() -> None:
    """A repeated string instruction is one hit.

    With the trap flag, each repetition traps, but Python is not entered.
    """
    with booted("x86_64", "trap flag") as kernel:
        memset = kernel.image.kallsyms.lookup_name("memset")
        assert memset is not None
        where = kernel.image.kallsyms.lookup(memset)
        assert where is not None
        code = kernel.image.read(memset, where.symbol.size)
        ring = kernel.hit_ring("cx")
        # rep stosb, for the bytes after the last word
        probe = ring.probe(symbol_name="memset", offset=code.index(b"\xf3\xaa"))
        kernel.register_kprobe(probe)
        area = kernel.machine.alloc_pages(4096)
        for _ in range(3):
            kernel.machine.call(memset, area, 7, 71)
        native = kernel.machine.hooks.native_traps
        with counted_entries(kernel) as entered:
            kernel.machine.call(memset, area, 9, 71)
        assert entered == []
        assert kernel.machine.memory.read(area, 72) == b"\x09" * 71 + b"\0"
        assert ring.hits == 4
        assert kernel.machine.hooks.native_traps - native == 1 + 7


def test_changed_handlers_take_effect_at_the_next_hit() -> None:
    """A change of handlers takes effect at the next hit, wherever the table of the host's routine led
    before.
    """
    for arch, mode in CASES:
        with booted(arch, mode) as kernel:
            ring = recording(kernel)
            seen: list[int] = []
            note: Any = partial(_note, seen)
            caller(kernel, 10)()
            probe = Kprobe(symbol_name=FUNCTION, offset=kernel.arch.call_size, pre_handler=note)
            kernel.register_kprobe(probe)
            caller(kernel, 10)()
            assert (ring.hits, len(seen)) == (20, 10)
            kernel.disable_kprobe(probe)
            caller(kernel, 10)()
            assert (ring.hits, len(seen)) == (30, 10)
            after = Kprobe(symbol_name=FUNCTION, offset=kernel.arch.call_size, post_handler=note)
            kernel.register_kprobe(after)
            caller(kernel, 10)()
            assert (ring.hits, len(seen)) == (40, 20)
            kernel.unregister_kprobe(after)
            kernel.enable_kprobe(probe)
            caller(kernel, 10)()
            assert (ring.hits, len(seen), probe.nmissed, after.nmissed) == (50, 30, 0, 0)


def _note(seen: list[int], _kprobe: object, _regs: object) -> None:
    seen.append(1)
