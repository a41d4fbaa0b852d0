"""Random operations on overlapping probes that are optimized: text, list and hits always agree with the
states of the probes.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.machine.text.text_poke import PokeStep
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.listed import list_lines
from tests.kprobes.modelled import MOSTLY, PICKS, SELDOM, OnKernel, run
from tests.kprobes.optimizer.conftest import Probed
from tests.ledger import ledger_mismatches

CALLS = {"gcd": ((12, 18), 6), "lcm": ((21, 6), 42)}
"""Function -> arguments and result. Regions of lcm have at least three instructions on all architectures."""
MEETING = 4
"""Number of places in the function at which probes are registered."""


@cache
def passes(arch: str, profile: str, function: str) -> dict[int, int]:
    """Return offset -> number of executions in one call, for the entry and for the first offsets that jumps
    cover.
    """
    found, covered = {}, {0}
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        probed, (arguments, result) = Probed(kernel), CALLS[function]
        where = kernel.image.kallsyms.lookup(probed.address(function))
        assert where is not None
        for offset in range(where.symbol.size):
            with suppress(KernelError):
                probe = probed.probe(function, offset)
                detour = kernel.kprobes.detour(probe)
                covered.update(range(offset, offset + detour.length) if detour is not None else ())
                probed.hits.clear()
                assert kernel.machine.call(probed.address(function), *arguments) == result
                found[offset] = len(probed.hits)
                kernel.unregister_kprobe(probe)
    return dict(islice(((offset, count) for offset, count in found.items() if offset in covered), MEETING))


class Optimizing(OnKernel):
    """A state machine on a kernel with an optimizer.

    Text, list and hits are compared with the states of the probes.
    """

    function: ClassVar[str]

    def __init__(self) -> None:
        self.passes = passes(self.arch, self.profile.name, self.function)
        super().__init__()
        self.probes: dict[Kprobe, int] = {}
        self.hits: Counter[Kprobe] = Counter()
        self.entries: Counter[Kprobe] = Counter()
        self.returns = 0
        self.kretprobe: Kretprobe | None = None
        self.is_counting = True
        self.kernel.machine.text.interrupt_cpus = self.run_in_between

    def run_in_between(self) -> None:
        """Call the function, as another CPU may do between two steps of patching."""
        if not self.kernel.machine.is_running:
            counted, self.is_counting = self.is_counting, False
            self.call_function()
            self.is_counting = counted

    @property
    def probed(self) -> Probed:
        return Probed(self.kernel)

    def warm_up(self) -> None:
        # The first probes allocate trampolines and pages of slots, which stay allocated.
        self.kernel.unregister_kprobe(self.probed.probe(self.function, max(self.passes)))
        kretprobe = Kretprobe(symbol_name=self.function, handler=lambda _instance, _regs: None)
        self.kernel.register_kretprobe(kretprobe)
        self.call_function()
        self.kernel.unregister_kretprobe(kretprobe)
        self.probed.settle()

    def call_function(self) -> None:
        arguments, result = CALLS[self.function]
        assert self.kernel.machine.call(self.probed.address(self.function), *arguments) == result

    def undo(self) -> None:
        self.kernel.unregister_kprobes(list(self.probes))
        if self.kretprobe is not None:
            self.kernel.unregister_kretprobe(self.kretprobe)
        self.kprobes.set_optimization(True)
        self.kprobes.set_stages(False)
        self.probed.settle()
        self.probed.settle()
        optimizer = self.probed.optimizer
        assert (optimizer.optimizing, optimizer.unoptimizing, optimizer.freeing) == ({}, {}, {})

    def pick(self, number: int) -> Kprobe:
        return list(self.probes)[number % len(self.probes)]

    @initialize(order=st.permutations(range(MEETING)), disabled=st.lists(st.booleans(), min_size=MEETING))
    def begin(self, order: list[int], disabled: list[bool]) -> None:
        """Register all probes first, because the fate of a jump depends on the order of its probes and on
        which of them are armed.
        """
        for number, is_disabled in zip(order, disabled, strict=False):
            self.register(number, disabled=is_disabled, stepped=False)

    @rule(number=PICKS, disabled=st.booleans(), stepped=SELDOM)
    def register(self, number: int, disabled: bool, stepped: bool) -> None:
        def hit(kprobe: Kprobe, _regs: Any) -> None:
            self.hits[kprobe] += self.is_counting

        offset = list(self.passes)[number % len(self.passes)]
        options: dict[str, Any] = {"post_handler": lambda _kp, _regs: None} if stepped else {}
        probe = self.probed.probe(self.function, offset, pre_handler=hit, disabled=disabled, **options)
        self.probes[probe] = offset

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def unregister(self, number: int) -> None:
        probe = self.pick(number)
        del self.probes[probe]
        self.kernel.unregister_kprobe(probe)

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def disable(self, number: int) -> None:
        self.kernel.disable_kprobe(self.pick(number))

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def enable(self, number: int) -> None:
        self.kernel.enable_kprobe(self.pick(number))

    @rule(armed=MOSTLY)
    def set_enabled(self, armed: bool) -> None:
        self.kprobes.set_enabled(armed)

    @rule(allowed=MOSTLY)
    def set_optimization(self, allowed: bool) -> None:
        self.kprobes.set_optimization(allowed)
        assert allowed or not any(self.kprobes.table.is_patched(probe) for probe in self.probes)

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def hold(self, number: int) -> None:
        probe = self.pick(number)
        self.kprobes.set_optimized(probe, False)
        assert not self.kprobes.table.is_patched(probe)

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def let_go(self, number: int) -> None:
        with suppress(KernelError):
            self.kprobes.set_optimized(self.pick(number), True)

    @rule(on=SELDOM)
    def switch_stages(self, on: bool) -> None:
        self.kprobes.set_stages(on)

    @precondition(lambda self: self.probed.optimizer.stages)
    @rule()
    def next_stage(self) -> None:
        self.kprobes.next_stage()

    @rule()
    def settle(self) -> None:
        self.probed.settle()
        if not self.probed.optimizer.allowed:
            return
        for probe in self.probes:
            head = self.kprobes.table.valid(probe)
            if head is not None and head.is_optimized:
                assert head.is_patched or head in self.probed.optimizer.stages

    @rule()
    def hook_return(self) -> None:
        if self.kretprobe is None:
            self.kretprobe = Kretprobe(symbol_name=self.function, handler=self._returned)
            self.kernel.register_kretprobe(self.kretprobe)
        else:
            self.kernel.unregister_kretprobe(self.kretprobe)
            self.kretprobe = None

    def _returned(self, *_: object) -> None:
        self.returns += self.is_counting

    @invariant()
    def a_call_gives_its_result_and_hits(self) -> None:
        for probe, offset in self.probes.items():
            if self.kprobes.table.is_armed(probe) and not probe.is_disabled:
                self.entries[probe] += self.passes[offset]
        before = self.returns
        self.call_function()
        for probe in self.probes:
            assert self.hits[probe] + probe.nmissed == self.entries[probe]
        assert self.returns - before == int(
            self.kretprobe is not None and not self.kprobes.table.all_disarmed
        )
        assert self.kprobes.hits.may_interrupt()

    @invariant()
    def text_is_as_the_probes_states_say(self) -> None:
        text, optimizer, arch = self.kernel.machine.text, self.probed.optimizer, self.kernel.arch
        assert ledger_mismatches(text) == []
        patched: set[int] = set()
        behind: set[int] = set()
        queues = [*optimizer.optimizing, *optimizer.unoptimizing, *optimizer.freeing]
        probes = [*self.probes, *([] if self.kretprobe is None else [self.kretprobe])]
        heads = [h for p in probes if (h := self.kprobes.table.valid(p)) is not None]
        for head in [*heads, *queues]:
            expected = self.armed_by(head)
            size = arch.call_size if head.is_ftrace else len(expected)
            if head.is_patched:
                assert head.detour is not None
                size = head.detour.length
                behind.update(range(head.address + 1, head.address + size))
                # After enough hits, the handlers are guest code, and the jump leads there.
                jump = head.detour.jump
                if head.compiled is not None:
                    jump = arch.detour_jump(head.detour.region, head.compiled.entry)
                assert text.current(head.address, len(jump)) == jump
            elif head in optimizer.stages:
                size = self._check_stopped(head)
            elif self._is_armed(head):
                assert text.current(head.address, len(expected)) == expected
            elif head not in queues:
                continue
            patched.update(range(head.address, head.address + size))
        assert not any(head.address in behind for head in heads if self._is_armed(head))
        assert text.ledger.keys() <= patched

    def _check_stopped(self, head: AggrKprobe) -> int:
        """Check the text of a jump whose change has stopped, and return the size of the jump's region."""
        optimizer = self.probed.optimizer
        assert head.detour is not None
        trap = self.kprobes.poker._breakpoint
        jump = head.detour.jump
        original = self.armed_by(head) + head.saved_tail
        is_jump = (head in optimizer.optimizing) == (optimizer.stages.step(head) is PokeStep.TAIL)
        tail = (jump if is_jump else original)[len(trap) :]
        assert self.kernel.machine.text.current(head.address, len(jump)) == trap + tail
        return head.detour.length

    def _is_armed(self, head: AggrKprobe) -> bool:
        """Return True if the text is patched for the probes of an address."""
        table = self.kprobes.table
        return table.get(head.address) is head and not head.is_disabled and not table.all_disarmed

    def armed_by(self, head: AggrKprobe) -> bytes:
        """Return the first bytes of an armed probe that is not optimized: a breakpoint, or the opcode of a
        call.
        """
        arch = self.kernel.arch
        if head.insn is None:
            return arch.relative_call(head.address, head.address)[:1]
        return arch.breakpoint_for(head.insn.prepared.length)

    @invariant()
    def list_tells_what_stands_in_the_text(self) -> None:
        optimizer, listed = self.probed.optimizer, Counter[tuple[int, bool, bool]]()
        for line in list_lines(self.kprobes):
            if line.split()[1] == "k":
                listed[int(line.split()[0], 16), "[DISABLED]" in line, "[OPTIMIZED]" in line] += 1
        expected = Counter[tuple[int, bool, bool]]()
        for probe in self.probes:
            head = self.kprobes.table.valid(probe)
            assert head is not None
            jumps = head.is_patched or head in optimizer.optimizing or head in optimizer.stages
            expected[head.address, probe.is_disabled, jumps] += 1
        assert listed == expected


@pytest.mark.stateful
@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize(
    ("arch", "profile"),
    [
        ("x86_64", "linux-6.1"),
        ("i386", "linux-6.1"),
        ("x86_64", "linux-6.1-nopreempt"),
        ("i386", "linux-6.1-nopreempt"),
        ("riscv64", "riscv-optprobes-2023"),
        ("riscv64i", "riscv-optprobes-2023"),
    ],
)
def test_optimizing(arch: str, profile: str, function: str) -> None:
    run(Optimizing, 30, arch=arch, profile=PROFILES[profile], function=function)
