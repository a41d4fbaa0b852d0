"""Random sequences of what can be done with probes, against a model, on the real image."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emulated_kernel.errors import KernelError
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from tests.kprobes.boundaries import Boundary, all_boundaries
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.functions import ProbesEverywhere
from tests.kprobes.model import Entry, Model

CALLS: dict[str, tuple[int | str | bytes, ...]] = {
    "gcd": (2**10 * 9, 2**7 * 27),
    "int_sqrt": (1 << 40,),
    "crc32_le": (0, b"12345", 5),
}
"""Functions that nothing else in the kernel calls meanwhile, with arguments."""


@cache
def reference() -> tuple[tuple[Boundary, ...], dict[str, Counter[int]]]:
    """The probeable instructions of the functions, and how often a call executes each."""
    with Kernel(profile=BREAKPOINTS) as kernel:
        boundaries = [b for b in all_boundaries(kernel.image) if b.function in CALLS]
        counts = {}
        with ProbesEverywhere(kernel.kprobes, boundaries) as probes:
            for name, arguments in CALLS.items():
                probes.hits.clear()
                kernel.call(name, *arguments)
                counts[name] = Counter(probes.hits)
        return tuple(b for b in boundaries if b.refusal is None), counts


def place(number: int) -> Boundary:
    """One of the probeable instructions; small numbers are few places, so that probes meet."""
    places = reference()[0]
    return places[number * 7 % len(places)]


PLACES = st.integers(0, 12)


def inside_an_instruction() -> Kprobe:
    boundary = next(b for b in reference()[0] if b.size > 1)
    return Kprobe(addr=boundary.addr + 1)


REFUSED: tuple[tuple[Callable[[], Kprobe], int], ...] = (
    (lambda: Kprobe(symbol_name="no_such_function"), errno.ENOENT),
    (lambda: Kprobe(symbol_name="gcd", addr=1), errno.EINVAL),
    (Kprobe, errno.EINVAL),
    (lambda: Kprobe(addr=0x1000), errno.ENOENT),
    (lambda: Kprobe(symbol_name="init_task"), errno.EINVAL),
    (lambda: Kprobe(symbol_name="asm_host_interrupt"), errno.EINVAL),
    (inside_an_instruction, errno.EILSEQ),
)


class Probing(RuleBasedStateMachine):
    """Acts on a kernel and on the model, and compares all that can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel(profile=BREAKPOINTS)
        self.model = Model()
        self.hits: Counter[int] = Counter()
        """By the number of the probe."""
        self.steps: Counter[int] = Counter()
        self.numbers: dict[Kprobe, int] = {}

    def teardown(self) -> None:
        kernel = self.kernel
        kernel.unregister_kprobes([entry.kprobe for _, entry in self.entries()])
        assert kernel.machine.text.ledger == {}
        assert kernel.kprobes.slots.used == 0
        assert len(kernel.machine.breakpoints) == 1, "the tracepoints' alone"
        kernel.close()

    def entries(self) -> list[tuple[int, Entry]]:
        return [(addr, entry) for addr, point in self.model.points.items() for entry in point.entries]

    def pick(self, number: int) -> tuple[int, Entry]:
        entries = self.entries()
        return entries[number % len(entries)]

    def kprobe(self, at: int, *, disabled: bool, by_name: bool, stepped: bool) -> tuple[int, Kprobe]:
        """A probe whose handlers count."""
        boundary = place(at)
        start = next(b.addr for b in reference()[0] if b.function == boundary.function)
        where: dict[str, Any] = {"addr": boundary.addr}
        if by_name:
            where = {"symbol_name": boundary.function, "offset": boundary.addr - start}

        number = len(self.numbers)

        def hit(_kprobe: Kprobe, _regs: Any) -> None:
            self.hits[number] += 1

        def step(_kprobe: Kprobe, _regs: Any) -> None:
            self.steps[number] += 1

        kprobe = Kprobe(**where, disabled=disabled, pre_handler=hit, post_handler=step if stepped else None)
        self.numbers[kprobe] = number
        return boundary.addr, kprobe

    @initialize()
    def warm_up(self) -> None:
        self.kernel.call("gcd", 1, 1)

    @rule(number=PLACES, disabled=st.booleans(), by_name=st.booleans(), stepped=st.booleans())
    def register(self, number: int, disabled: bool, by_name: bool, stepped: bool) -> None:
        addr, kprobe = self.kprobe(number, disabled=disabled, by_name=by_name, stepped=stepped)
        self.kernel.register_kprobe(kprobe)
        assert kprobe.address == addr
        self.model.register(addr, kprobe, disabled)

    @rule(refused=st.sampled_from(REFUSED))
    def register_refused(self, refused: tuple[Callable[[], Kprobe], int]) -> None:
        make, expected = refused
        with pytest.raises(KernelError) as caught:
            self.kernel.register_kprobe(make())
        assert caught.value.errno == expected

    @precondition(lambda self: self.model.points)
    @rule(number=st.integers(0, 20))
    def register_again(self, number: int) -> None:
        _, entry = self.pick(number)
        with pytest.raises(KernelError) as caught:
            self.kernel.register_kprobe(entry.kprobe)
        assert caught.value.errno == errno.EINVAL

    @rule(numbers=st.lists(PLACES, min_size=1, max_size=5), bad=st.none() | st.sampled_from(REFUSED))
    def register_batch(self, numbers: list[int], bad: tuple[Callable[[], Kprobe], int] | None) -> None:
        made = [self.kprobe(n, disabled=False, by_name=False, stepped=n % 2 == 0) for n in numbers]
        batch = [kprobe for _, kprobe in made]
        for addr, kprobe in made:
            self.model.register(addr, kprobe, disabled=False)
        if bad is None:
            self.kernel.register_kprobes(batch)
            return
        with pytest.raises(KernelError) as caught:
            self.kernel.register_kprobes([*batch, bad[0]()])
        assert caught.value.errno == bad[1]
        for addr, kprobe in made:
            self._forget(addr, kprobe)

    def _forget(self, addr: int, kprobe: Kprobe) -> None:
        entry = next(e for e in self.model.points[addr].entries if e.kprobe is kprobe)
        self.model.unregister(addr, entry)

    @precondition(lambda self: self.model.points)
    @rule(number=st.integers(0, 20))
    def unregister(self, number: int) -> None:
        addr, entry = self.pick(number)
        self.kernel.unregister_kprobe(entry.kprobe)
        self.kernel.unregister_kprobe(entry.kprobe)
        self.model.unregister(addr, entry)

    @precondition(lambda self: self.model.points)
    @rule(number=st.integers(0, 20))
    def disable(self, number: int) -> None:
        addr, entry = self.pick(number)
        self.kernel.disable_kprobe(entry.kprobe)
        self.model.disable(addr, entry)

    @precondition(lambda self: self.model.points)
    @rule(number=st.integers(0, 20))
    def enable(self, number: int) -> None:
        addr, entry = self.pick(number)
        self.kernel.enable_kprobe(entry.kprobe)
        self.model.enable(addr, entry)

    @rule(armed=st.booleans())
    def set_enabled(self, armed: bool) -> None:
        self.kernel.kprobes.set_enabled(armed)
        self.model.all_disarmed = not armed

    @rule(name=st.sampled_from(sorted(CALLS)))
    def call(self, name: str) -> None:
        self.kernel.call(name, *CALLS[name])
        self.model.called(reference()[1][name])

    @invariant()
    def text_is_as_the_ledger_says(self) -> None:
        machine = self.kernel.machine
        armed = self.model.armed()
        assert machine.text.ledger.keys() == armed
        assert machine.text.verify() == []
        assert all(machine.memory.read_u8(addr) == 0xCC for addr in armed)
        assert armed <= machine.breakpoints.keys()

    @invariant()
    def list_is_the_models(self) -> None:
        kprobes = self.kernel.kprobes
        lines = [line.rstrip("\n") for line in kprobes.list_text()]
        expected = self.model.listed()
        assert [(int(line.split()[0], 16), line.endswith("[DISABLED]")) for line in lines] == expected
        assert kprobes.enabled is not self.model.all_disarmed

    @invariant()
    def every_entry_is_a_hit(self) -> None:
        for _, entry in self.entries():
            kprobe = entry.kprobe
            number = self.numbers[kprobe]
            assert self.hits[number] + kprobe.nmissed == entry.hits
            assert self.steps[number] == (entry.hits if kprobe.post_handler else 0)
        assert self.kernel.kprobes.hits.may_interrupt()


Probing.TestCase.settings = settings(
    derandomize=True, max_examples=200, stateful_step_count=40, deadline=None, database=None
)
TestProbing = Probing.TestCase
