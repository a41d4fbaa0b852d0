"""Insn slots: their pages, and the collection of slots that are no longer used."""

from __future__ import annotations

import errno

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.kprobes.hit.insn_slots import InsnSlots
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.scripted import ScriptedGracePeriod


class Text:
    """A stand-in for executable memory, with a limited number of pages."""

    def __init__(self, pages: int) -> None:
        self.free = [0x10000 + number * 0x1000 for number in range(pages)]
        self.poked: list[int] = []

    def alloc_text(self, size: int) -> int:
        assert size == 4096
        if not self.free:
            raise HardwareError("none left")
        return self.free.pop()

    def free_text(self, va: int) -> None:
        self.free.append(va)

    def poke(self, va: int, data: bytes) -> None:
        assert data == b"\xcc" * 16
        self.poked.append(va)


@pytest.fixture
def text() -> Text:
    return Text(3)


@pytest.fixture
def scheduler() -> ScriptedGracePeriod:
    return ScriptedGracePeriod()


@pytest.fixture
def garbage(scheduler: ScriptedGracePeriod) -> DeferredFree:
    return DeferredFree(scheduler)


@pytest.fixture
def slots(text: Text, garbage: DeferredFree) -> InsnSlots:
    return InsnSlots(text, 15, b"\xcc", garbage)


def test_slots_share_pages(slots: InsnSlots) -> None:
    taken = [slots.get() for _ in range(slots.slots_per_page + 1)]
    assert len(set(taken)) == len(taken) == 257
    assert (slots.pages, slots.used) == (2, 257)
    assert {slot % 16 for slot in taken} == {0}


def test_a_slot_without_a_copy_is_given_back_as_it_is(slots: InsnSlots, text: Text) -> None:
    slot = slots.get()
    slots.give_back(slot)
    assert (slots.used, text.poked) == (0, [])
    assert slots.get() == slot
    slots.free(slot)
    assert text.poked == [slot]


def test_no_memory(slots: InsnSlots) -> None:
    taken = [slots.get() for _ in range(3 * slots.slots_per_page)]
    with pytest.raises(KernelError) as caught:
        slots.get()
    assert caught.value.errno == errno.ENOMEM
    slots.free(taken[7])
    assert slots.get() == taken[7]


def test_one_empty_page_is_kept(slots: InsnSlots, text: Text) -> None:
    taken = [slots.get() for _ in range(2 * slots.slots_per_page)]
    for slot in taken:
        slots.free(slot)
    assert (slots.pages, slots.used, len(text.free)) == (1, 0, 2)


class TestGarbage:
    def test_dirty_slots_are_left_alone(self, slots: InsnSlots, text: Text) -> None:
        taken = [slots.get() for _ in range(4)]
        for slot in taken:
            slots.free(slot, dirty=True)
        assert (slots.used, slots.garbage, text.poked) == (0, 4, [])
        assert slots.get() not in taken

    def test_collected_when_there_is_more_than_a_page_of_it(self, slots: InsnSlots) -> None:
        taken = [slots.get() for _ in range(slots.slots_per_page + 1)]
        for slot in taken:
            slots.free(slot, dirty=True)
        assert (slots.garbage, slots.pages) == (0, 1)

    def test_collected_before_memory_is_asked_for(self, slots: InsnSlots) -> None:
        taken = [slots.get() for _ in range(3 * slots.slots_per_page)]
        slots.free(taken[5], dirty=True)
        assert slots.get() == taken[5]

    def test_not_while_somebody_is_in_it(
        self, slots: InsnSlots, garbage: DeferredFree, scheduler: ScriptedGracePeriod
    ) -> None:
        one, other = slots.get(), slots.get()
        occupied = [(one, one + 16)]
        scheduler.occupied_of = lambda _spans: occupied
        freed: list[str] = []
        slots.free(one, dirty=True, on_free=lambda: freed.append("one"))
        slots.free(other, dirty=True, on_free=lambda: freed.append("other"))
        assert not garbage.collect()
        assert (freed, slots.garbage, garbage.spans) == (["other"], 1, occupied)
        assert garbage.work.due is not None
        occupied.clear()
        garbage.work.flush()
        assert (freed, slots.garbage, garbage.spans) == (["other", "one"], 0, [])
        assert garbage.work.due is None

    def test_not_while_somebody_is_on_the_way(
        self, slots: InsnSlots, garbage: DeferredFree, scheduler: ScriptedGracePeriod
    ) -> None:
        occupied = [(1, 2)]
        scheduler.occupied_of = lambda _spans: occupied
        garbage.add((1, 2), lambda: None, leads_on=True)
        slots.free(slots.get(), dirty=True)
        assert not garbage.collect()
        assert slots.garbage == 1
        occupied.clear()
        assert garbage.collect()
        assert slots.garbage == 0


def test_boosted_probes_leave_garbage() -> None:
    """After a boosted probe is unregistered, its slot stays unchanged until a collection.

    A task that was interrupted in the slot still jumps back from there.
    """
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        kprobe = Kprobe(symbol_name="gcd", offset=5)
        kernel.register_kprobe(kprobe)
        head = kernel.kprobes.table.valid(kprobe)
        assert head is not None
        assert head.insn is not None
        slot = head.insn.slot
        assert slot is not None
        assert head.insn.boosted
        before = kernel.machine.text.current(slot, 8)
        kernel.unregister_kprobe(kprobe)
        assert kernel.machine.text.current(slot, 8) == before
        assert kernel.kprobes.slots.garbage == 1
        assert kernel.kprobes.garbage.collect()
        assert kernel.machine.text.current(slot, 8) == b"\xcc" * 8
