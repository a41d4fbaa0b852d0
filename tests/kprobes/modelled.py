"""State machines over the probe API: random operations on a kernel and a model, which must agree."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.jprobe import Jprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.boundaries import Boundary, all_boundaries
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.functions import ProbesEverywhere
from tests.kprobes.listed import list_lines
from tests.kprobes.model import Entry, Model
from tests.ledger import ledger_mismatches
from tests.sample import fewer

CALLS: dict[str, tuple[int | str | bytes, ...]] = {
    "gcd": (2**10 * 9, 2**7 * 27),
    "int_sqrt": (1 << 30,),
    "crc32_le": (0, b"12345", 5),
}
"""Function that nothing else in the kernel calls during a test -> its arguments."""
PLACES = st.integers(0, 12)
PICKS = st.integers(0, 20)
MOSTLY = st.sampled_from([True, True, True, False])
SELDOM = MOSTLY.map(operator.not_)


class Reference(NamedTuple):
    """The probed boundaries of each function in CALLS, the result of a call, and the executions of each
    instruction in the call.
    """

    boundaries: tuple[Boundary, ...]
    """The instructions of the functions in CALLS that can be probed."""
    counts: dict[str, Counter[int]]
    """Function -> instruction -> number of times that a call executes the instruction."""
    results: dict[str, int]


@cache
def reference(arch: str) -> Reference:
    """Return the reference data of an architecture."""
    with Kernel(MachineConfig(arch=arch), profile=BREAKPOINTS) as kernel:
        boundaries = [b for b in all_boundaries(kernel.image) if b.function in CALLS]
        counts, results = {}, {}
        with ProbesEverywhere(kernel.kprobes, boundaries) as probes:
            for name, arguments in CALLS.items():
                probes.hits.clear()
                results[name] = kernel.call(name, *arguments)
                counts[name] = Counter(probes.hits)
        return Reference(tuple(b for b in boundaries if b.refusal is None), counts, results)


def run(machine: type[OnKernel], examples: int, **attributes: Any) -> None:
    """Run a state machine with some of its class attributes set."""
    spare: list[Kernel] = []
    try:
        run_state_machine_as_test(
            type("Machine", (machine,), {**attributes, "spare": spare}),
            settings=settings(max_examples=fewer(examples, 4), stateful_step_count=40),
        )
    finally:
        for kernel in spare:
            kernel.close()


class OnKernel(RuleBasedStateMachine):
    """Operations on a kernel that several examples share.

    After undo(), the kernel's state is the same as before the example.
    """

    arch: ClassVar[str] = "x86_64"
    profile: ClassVar[Profile] = BREAKPOINTS
    spare: ClassVar[list[Kernel]]

    def __init__(self) -> None:
        super().__init__()
        fresh = not self.spare
        config = MachineConfig(arch=self.arch)
        self.kernel = Kernel(config, profile=self.profile) if fresh else self.spare.pop()
        self.kprobes = self.kernel.kprobes
        if fresh:
            self.warm_up()
        self.before = self._held()

    def warm_up(self) -> None:
        """Use each kind of resource that stays allocated after its first use."""

    def undo(self) -> None:
        """Unregister all probes, and do all deferred frees."""

    def _held(self) -> tuple[int, int, int]:
        machine = self.kernel.machine
        return machine.text._slots.used, self.kprobes.slots.used, len(machine.breakpoints)

    def teardown(self) -> None:
        is_well = sys.exc_info()[0] is None
        try:
            self.kprobes.set_enabled(True)
            self.undo()
            self._check_undone()
        except BaseException:
            is_well = False
            raise
        finally:
            if is_well:
                self.spare.append(self.kernel)
            else:
                self.kernel.close()

    def _check_undone(self) -> None:
        self.kprobes.garbage.work.flush()
        assert self.kernel.machine.text.ledger == {}
        assert ledger_mismatches(self.kernel.machine.text) == []
        assert list_lines(self.kprobes) == []
        assert self._held() == self.before


class Modelled(OnKernel):
    """Operations on probes of any kind; subclasses register the probes."""

    def __init__(self) -> None:
        self.reference = reference(self.arch)
        self.places = [b.addr for b in self.reference.boundaries][::7]
        """Addresses at which probes are registered."""
        self.hits: Counter[int] = Counter()
        """Number of a probe -> number of its hits."""
        self.steps: Counter[int] = Counter()
        self.numbers: dict[Kprobe, int] = {}
        self.owners: dict[Kprobe, Jprobe] = {}
        """Kprobe -> the jprobe of which it is a part."""
        super().__init__()
        self.model = Model(self.kernel.machine.model.bits)

    def warm_up(self) -> None:
        first = self.kprobe(self.entry("gcd"))
        self.kernel.register_kprobe(first)
        self.kernel.call("gcd", 1, 1)
        self.kernel.unregister_kprobe(first)

    def undo(self) -> None:
        for _, entry in self.entries():
            self.act("unregister", entry)

    def entries(self) -> list[tuple[int, Entry]]:
        return [(addr, entry) for addr, point in self.model.points.items() for entry in point.entries]

    def pick(self, number: int) -> tuple[int, Entry]:
        entries = self.entries()
        return entries[number % len(entries)]

    def place(self, number: int) -> int:
        """Return the address for a random number.

        Only a few addresses exist, and so several probes share an address.
        """
        return self.places[number % len(self.places)]

    def name(self, addr: int) -> tuple[str, int]:
        """Return the function and the offset of an address."""
        function = next(b.function for b in self.reference.boundaries if b.addr == addr)
        return function, addr - self.entry(function)

    def entry(self, function: str) -> int:
        return next(b.addr for b in self.reference.boundaries if b.function == function)

    def counter(self) -> tuple[int, dict[str, Any]]:
        """Return the number of a new probe, and handlers that count its hits."""
        number = len(self.numbers)

        def hit(_kprobe: Kprobe, _regs: Any) -> None:
            self.hits[number] += 1

        def step(_kprobe: Kprobe, _regs: Any) -> None:
            self.steps[number] += 1

        return number, {"pre_handler": hit, "post_handler": step}

    def kprobe(
        self,
        addr: int,
        *,
        disabled: bool = False,
        by_name: bool = False,
        stepped: bool = False,
        length: int = 0,
    ) -> Kprobe:
        """Return a probe whose handlers count its hits.

        `by_name`: give its place as symbol and offset. `stepped`: with a post_handler, so that each hit is
        stepped. `length`: length of a djprobe's region; 0 for a kprobe.
        """
        number, handlers = self.counter()
        if not stepped:
            del handlers["post_handler"]
        where: dict[str, Any] = {"addr": addr}
        if by_name:
            where = dict(zip(("symbol_name", "offset"), self.name(addr), strict=True))
        kprobe = Kprobe(**where, **handlers, disabled=disabled, length=length)
        self.numbers[kprobe] = number
        return kprobe

    def act(self, verb: str, entry: Entry) -> None:
        """Call the API function for `verb` and the kind of the entry's probe, such as disable_kretprobe."""
        kind = {"k": "kprobe", "j": "jprobe", "r": "kretprobe"}[entry.kind]
        getattr(self.kernel, f"{verb}_{kind}")(self.owners.get(entry.kprobe, entry.kprobe))

    @precondition(lambda self: self.model.points)
    @rule(number=PICKS)
    def unregister(self, number: int) -> None:
        addr, entry = self.pick(number)
        self.act("unregister", entry)
        self.act("unregister", entry)
        self.model.unregister(addr, entry)

    @precondition(lambda self: self.model.points)
    @rule(number=PICKS)
    def disable(self, number: int) -> None:
        addr, entry = self.pick(number)
        self.act("disable", entry)
        self.model.disable(addr, entry)

    @precondition(lambda self: self.model.points)
    @rule(number=PICKS)
    def enable(self, number: int) -> None:
        addr, entry = self.pick(number)
        self.act("enable", entry)
        self.model.enable(addr, entry)

    @rule(armed=MOSTLY)
    def set_enabled(self, armed: bool) -> None:
        self.kprobes.set_enabled(armed)
        self.model.all_disarmed = not armed

    @rule(name=st.sampled_from(sorted(CALLS)))
    def call(self, name: str) -> None:
        assert self.kernel.call(name, *CALLS[name]) == self.reference.results[name]
        self.model.called(self.reference.counts[name])

    def patches(self) -> Mapping[int, bytes]:
        """Return address -> changed bytes of the text."""
        return dict.fromkeys(self.model.armed(), b"\xcc")

    @invariant()
    def text_is_as_the_ledger_says(self) -> None:
        machine = self.kernel.machine
        changed: set[int] = set()
        for addr, data in self.patches().items():
            assert machine.text.current(addr, len(data)) == data
            original = self.kernel.image.read(addr, len(data))
            changed.update(addr + at for at, byte in enumerate(data) if byte != original[at])
            if data == b"\xcc":
                assert addr in machine.breakpoints
        assert machine.text.ledger.keys() == changed
        assert ledger_mismatches(machine.text) == []

    def optimized(self) -> set[int]:
        """Return the addresses that kprobes/list shows as optimized."""
        return set()

    @invariant()
    def list_is_the_models(self) -> None:
        optimized = self.optimized()
        shown = [
            (int(line.split()[0], 16), line.split()[1], "[DISABLED]" in line, "[OPTIMIZED]" in line)
            for line in list_lines(self.kprobes)
        ]
        assert shown == [(*line, line[0] in optimized) for line in self.model.listed()]
        assert self.kprobes.table.all_disarmed is self.model.all_disarmed

    @invariant()
    def every_entry_is_a_hit(self) -> None:
        for _, entry in self.entries():
            kprobe = entry.kprobe
            number = self.numbers[kprobe]
            assert self.hits[number] == entry.hits
            assert kprobe.nmissed == entry.missed
            assert self.steps[number] == (entry.hits if kprobe.post_handler else 0)
        assert self.kprobes.hits.may_interrupt()
