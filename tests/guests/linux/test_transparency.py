"""A short form of stress.linux.transparency, and tests that its comparison finds what a probe changes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emulated_kernel.guests.linux.probing.linux_context import linux_abi
from emulated_kernel.kprobes.kprobe import Kprobe
from stress.linux.everywhere import functions
from stress.linux.transparency import (
    KEPT,
    OBJECTS,
    PENDING,
    PROBED,
    REGISTERS,
    RETURNED,
    Call,
    Caller,
    Comparison,
    Effect,
)
from tests.guests.linux.probing import MODES, engine, kernel
from tests.guests.linux.rewind import PAGE, Rewind
from tests.guests.linux.traced import TRACED
from tests.sample import fewer, share

pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the host has no pagemap")

WHOLE_TRACERS = ("graph", "profile", "functions")
"""Tracers of all functions, each of which takes seconds to start."""
MODES_COMPARED = (
    *PROBED,
    *(mode for mode in TRACED if mode not in WHOLE_TRACERS),
    *share(WHOLE_TRACERS, 0, 3),
)


def test_calls_are_the_same_in_all_modes() -> None:
    comparison = Comparison(2, MODES_COMPARED)
    comparison.compare(functions(fewer(300, 30), seed=2), 2)
    comparison.close()
    assert comparison.differences == []
    assert comparison.ends["its"] > comparison.functions / 2
    for mode in MODES_COMPARED:
        assert comparison.hits[mode] > comparison.functions


def test_functions_by_name() -> None:
    found = functions(5, 3, "^vfs_.*x")
    places = [kernel().kallsyms.lookup(address) for address in found]
    assert len(found) == 5
    assert all(place is not None and re.match("vfs_.*x", place.name) for place in places)


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    found = Caller(engine(MODES["boosted"]), 1.0)
    yield found
    found.engine.tasks.machine.close()


def address_of(name: str) -> int:
    found = kernel().kallsyms.lookup_name(name)
    assert found is not None
    return found


@pytest.mark.parametrize("wrong", ["register", "memory"])
def test_what_a_probe_changes_is_told(wrong: str, caller: Caller) -> None:
    memory = caller.engine.machine.memory
    call = Call(address_of("strlcpy"), (OBJECTS, OBJECTS + 4096, 64), (bytes(4096), b"some text\0"))

    def change(_kprobe: Kprobe, regs: object) -> None:
        if wrong == "register":
            regs.r10 = 1  # type: ignore[attr-defined]
        else:
            memory.write(OBJECTS + 100, b"y")

    caller.begin()
    expected = caller.call(call)
    assert expected is not None
    assert expected.end == "its return"
    assert expected.memory
    probe = Kprobe(addr=call.function, pre_handler=change)
    with caller.engine.lock:
        caller.engine.kprobes.register_kprobe(probe)
    caller.begin()
    found = caller.call(call)
    with caller.engine.lock:
        caller.engine.kprobes.unregister_kprobe(probe)
    assert found is not None
    assert ("r10=0x1" if wrong == "register" else "page") in found.difference(expected, 0)


@pytest.mark.parametrize(("at", "wrong"), [(8, ""), (16, "page 0x4000")])
def test_pending_calls_in_a_copied_task_may_differ(at: int, wrong: str) -> None:
    def effect(page: bytes) -> Effect:
        return Effect(RETURNED, (0,) * len(REGISTERS), {0x4000: page}, frozenset([0x4008]))

    page = bytearray(4096)
    expected = effect(bytes(page))
    page[at] = 2
    found = effect(bytes(page)).without(KEPT, lambda one, _two: one, expected)
    assert found.difference(expected, 0) == wrong


def test_remains_on_stacks_may_differ(caller: Caller) -> None:
    """Data that code has left below a stack pointer may differ with a probe, and are no deviation.

    Here, a probe leaves such data on the stack of a worker, which wakes the caller.
    """
    memory = caller.engine.machine.memory
    left = random.Random(3).randbytes(256)

    def leave(_kprobe: Kprobe, regs: Any) -> None:
        memory.write(regs.sp - len(left), left)

    call = Call(address_of("lru_add_drain_all"), (), ())
    caller.note_switches()
    caller.begin()
    plain = caller.call(call)
    assert plain is not None
    assert caller.has_switched
    expected = replace(plain, remains=caller.remains(call, plain))
    assert expected.remains
    probe = Kprobe(addr=address_of("update_rq_clock"), pre_handler=leave)
    with caller.engine.lock:
        caller.engine.kprobes.register_kprobe(probe)
    caller.begin()
    found = caller.call(call)
    with caller.engine.lock:
        caller.engine.kprobes.unregister_kprobe(probe)
    assert found is not None
    assert "page" in found.difference(expected, 0)
    assert found.with_remains(expected, caller.initial).difference(expected, 0) == ""


def test_pending_calls_of_a_task_that_sleeps_are_dropped() -> None:
    """If a hooked function sleeps, and the call ends in a worker, the pending calls of the sleeping task are
    dropped.
    """
    traced = TRACED["hooks"](engine(MODES["ftrace"]))
    caller = Caller(traced.engine, 1.0, traced)
    memory, task = traced.engine.machine.memory, traced.engine.guest.running()
    pending = memory.translate(task + linux_abi(kernel(), traced.engine.tasks)[PENDING[0]])
    function = address_of("lru_add_drain_all")
    traced.on([function])
    caller.note_switches()
    caller.begin()
    effect = caller.call(Call(function, (), ()))
    traced.off()
    page, at = pending & -PAGE, pending % PAGE
    assert effect is not None
    assert (effect.end == RETURNED, caller.has_switched) == (False, True)
    assert effect.memory[page][at : at + 8] == caller.initial(page)[at : at + 8]
    caller.engine.tasks.machine.close()


@pytest.mark.parametrize(("at", "wrong"), [(8, ""), (16, "page 0x4000")])
def test_only_remains_may_differ(at: int, wrong: str) -> None:
    initial = bytes(4096)
    expected = Effect(RETURNED, (0,) * len(REGISTERS), {}, remains=frozenset([0x4008]))
    page = bytearray(initial)
    page[at] = 2
    found = replace(expected, memory={0x4000: bytes(page)})
    assert found.with_remains(expected, lambda _page: initial).difference(expected, 0) == wrong


def test_memory_is_as_before() -> None:
    machine = engine(MODES["boosted"]).tasks.machine
    rewind, ram = Rewind(machine.memory.ram, bool), machine.memory.ram
    rewind.keep()
    # All pages are this process's where it has booted the kernel itself; page 0 isn't compared.
    written, clean = next(filter(None, rewind.written())), 100 << 20
    before = ram[written : written + 4096], ram[clean : clean + 4096]
    ram[written : written + 4096] = ram[clean : clean + 4096] = b"z" * 4096
    assert {written, clean} <= set(rewind.changed())
    ram[clean : clean + 4096] = before[1]
    assert clean not in rewind.changed(), "it was written, but has the same contents"
    ram[clean : clean + 4096] = b"z" * 4096
    rewind.back()
    assert (ram[written : written + 4096], ram[clean : clean + 4096]) == before
    assert rewind.changed() == {}
    machine.close()
