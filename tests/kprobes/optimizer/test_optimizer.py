"""The optimizer's lists: which probes get a jump, which probes lose it, and that no hit is lost meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.optimizer.optimizer import OPTIMIZE_DELAY
from emulated_kernel.machine.text.text_poke import PokeStep, TextPoker
from emulated_kernel.util.errors import KernelError
from tests.kprobes.optimizer.conftest import GCD_HEAD, GCD_TAIL, Boot, Probed
from tests.kprobes.optimizer.regions import optimizable
from tests.kprobes.scripted import script
from tests.ledger import ledger_mismatches

HIT = ("gcd", GCD_HEAD)
INNER = ("gcd", GCD_TAIL)


def threes(probed: Probed) -> Iterator[tuple[int, int, int]]:
    """Yield the first three instructions of each region that has at least three."""
    arch = probed.kernel.arch
    for _, _, start in optimizable(probed):
        insns = arch.instruction_boundaries(probed.region(start).code, start)
        if len(insns) > 2:
            yield insns[0], insns[1], insns[2]


class TestSteps:
    """After each step of patching, the guest can run the patched code, and the hits are right."""

    @pytest.fixture
    def steps(
        self, probed: Probed, monkeypatch: pytest.MonkeyPatch
    ) -> list[tuple[PokeStep, bytes, int, list[tuple[str, int]]]]:
        """Return a list that collects (step, bytes at the probe, number of bytes in the ledger, hits of a
        call) at each further step.
        """
        seen = []

        write = TextPoker._write

        def write_and_look(poker: TextPoker, step: PokeStep, insns: Mapping[int, bytes]) -> None:
            write(poker, step, insns)
            text, (address,) = probed.kernel.machine.text, insns
            assert ledger_mismatches(text) == []
            seen.append((step, text.current(address, 5), len(text.ledger), probed.gcd()))

        monkeypatch.setattr(TextPoker, "_write", write_and_look)
        return seen

    def test_optimizing(self, probed: Probed, steps: list[Any]) -> None:
        original = probed.text("gcd", GCD_HEAD)
        probe = probed.probe("gcd", GCD_HEAD)
        assert steps == [], "an int3 is one byte, and no step"
        probed.settle()
        detour = probed.kernel.kprobes.detour(probe)
        assert detour is not None
        jump = detour.jump
        assert [step[:2] for step in steps] == [
            (PokeStep.BREAKPOINT, b"\xcc" + original[1:]),
            (PokeStep.TAIL, b"\xcc" + jump[1:]),
            (PokeStep.FIRST_BYTE, jump),
        ]
        assert [step[2] for step in steps[:1]] == [1]
        assert all(step[3] == [HIT] for step in steps)

    def test_unoptimizing(self, probed: Probed, steps: list[Any]) -> None:
        original = probed.text("gcd", GCD_HEAD)
        probed.probe("gcd", GCD_HEAD)
        probed.settle()
        jump = probed.text("gcd", GCD_HEAD)
        steps.clear()
        probed.kernel.kprobes.set_optimization(False)
        assert [step[:2] for step in steps] == [
            (PokeStep.BREAKPOINT, b"\xcc" + jump[1:]),
            (PokeStep.TAIL, b"\xcc" + original[1:]),
        ]
        assert all(step[3] == [HIT] for step in steps)
        assert len(probed.kernel.machine.text.ledger) == 1

    def test_a_disabled_probe_is_passed_through(self, probed: Probed, steps: list[Any]) -> None:
        probe = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        probed.kernel.disable_kprobe(probe)
        assert probed.text("gcd", GCD_HEAD)[0] == 0xE9
        assert probed.gcd() == []
        steps.clear()
        probed.settle()
        assert all(step[3] == [] for step in steps)
        assert probed.kernel.machine.text.ledger == {}

    def test_fentry_site(self, probed: Probed, steps: list[Any]) -> None:
        nop = probed.text("gcd", 0)
        probe = probed.probe("gcd")
        call = probed.text("gcd", 0)
        assert call[0] == 0xE8
        probed.kernel.disable_kprobe(probe)
        assert [step[1] for step in steps] == [
            b"\xcc" + nop[1:], b"\xcc" + call[1:], call, b"\xcc" + call[1:], b"\xcc" + nop[1:], nop,
        ]  # fmt: skip
        assert [step[3] for step in steps] == [[("gcd", 0)]] * 3 + [[]] * 3


class TestHits:
    def test_exact_across_modes(self, probed: Probed) -> None:
        kprobes = probed.kernel.kprobes
        probe = probed.probe("gcd", GCD_HEAD)
        for _ in range(3):
            assert (kprobes.mode(probe), probed.gcd()) == ("int3", [HIT])
            probed.settle()
            assert (kprobes.mode(probe), probed.gcd()) == ("optimized", [HIT])
            kprobes.set_optimization(False)
            assert (kprobes.mode(probe), probed.gcd()) == ("int3", [HIT])
            kprobes.set_optimization(True)
        assert probe.nmissed == 0
        probed.kernel.unregister_kprobe(probe)
        assert probed.gcd() == []

    def test_registers(self, probed: Probed) -> None:
        """A handler sees the same registers at a hit by a jump as at a hit by a breakpoint."""
        seen: list[tuple[int, ...]] = []
        names = ("ip", "sp", "flags", "cs", "ss", "orig_ax", "ax", "di", "si", "dx", "bx", "bp", "r8", "r15")

        def look(_kprobe: Kprobe, regs: Any) -> None:
            seen.append(tuple(getattr(regs, name) for name in names))

        probed.probe("gcd", GCD_HEAD, pre_handler=look)
        probed.gcd()
        probed.settle()
        probed.gcd()
        live, saved = seen
        assert saved == live
        assert live[0] == probed.address("gcd", GCD_HEAD + 1)

    def test_a_handler_changes_registers(self, probed: Probed) -> None:
        def change(_kprobe: Kprobe, regs: Any) -> None:
            regs.di, regs.si = 35, 49

        probed.probe("gcd", GCD_HEAD, pre_handler=change)
        call = probed.kernel.machine.call
        assert call(probed.address("gcd"), 1, 1) == 7
        probed.settle()
        assert call(probed.address("gcd"), 1, 1) == 7

    def test_members_fire_newest_first(self, probed: Probed) -> None:
        order: list[str] = []
        for name in ("first", "second", "third"):
            probed.probe("gcd", GCD_HEAD, pre_handler=lambda _kp, _regs, name=name: order.append(name))
        probed.settle()
        probed.gcd()
        assert order == ["third", "second", "first"]

    def test_a_handler_cannot_go_elsewhere(self, probed: Probed) -> None:
        """As in Linux, a detour ignores the result of a pre-handler, and a change of ip."""

        def leave(_kprobe: Kprobe, regs: Any) -> int:
            regs.ip = 0
            return 1

        probed.probe("gcd", GCD_HEAD)
        probed.probe("gcd", GCD_HEAD, pre_handler=leave)
        probed.settle()
        assert probed.gcd() == [HIT]

    def test_a_member_can_be_disabled(self, probed: Probed) -> None:
        kept, other = probed.probe("gcd", GCD_HEAD), probed.probe("gcd", GCD_HEAD)
        probed.settle()
        probed.kernel.disable_kprobe(other)
        assert (probed.gcd(), probed.flags()) == ([HIT], {"gcd+0x5": "[DISABLED][OPTIMIZED],[OPTIMIZED]"})
        probed.kernel.disable_kprobe(kept)
        probed.settle()
        assert probed.gcd() == []
        probed.kernel.enable_kprobe(other)
        assert probed.gcd() == [HIT]


class TestWhoIsOptimized:
    def test_waits_five_jiffies(self, probed: Probed) -> None:
        work, scheduler = probed.optimizer.work, script(probed.kernel)
        scheduler.now = 100
        probe = probed.probe("gcd", GCD_HEAD)
        scheduler.now += OPTIMIZE_DELAY - 1
        work.run_if_due()
        assert probed.kernel.kprobes.mode(probe) == "int3"
        scheduler.now += 1
        work.run_if_due()
        assert probed.kernel.kprobes.mode(probe) == "optimized"
        assert work.due is None

    def test_a_post_handler_prevents_it(self, probed: Probed) -> None:
        probe = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        done: list[int] = []
        late = probed.probe("gcd", GCD_HEAD, post_handler=lambda _kp, regs: done.append(regs.ip))
        assert probed.text("gcd", GCD_HEAD)[0] == 0xCC
        assert "post_handler" in probed.kernel.kprobes.reason(probe)
        probed.settle()
        assert (probed.gcd(), len(done)) == ([HIT, HIT], 1)
        probed.kernel.unregister_kprobe(late)
        probed.settle()
        assert probed.kernel.kprobes.mode(probe) == "optimized"

    def test_an_overlapping_probe_takes_the_jump_away(self, probed: Probed) -> None:
        outer = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        inner = probed.probe("gcd", GCD_TAIL)
        assert probed.text("gcd", GCD_HEAD, 1) == probed.text("gcd", GCD_TAIL, 1) == b"\xcc"
        assert probed.gcd() == [HIT, INNER]
        assert f"gcd+{inner.offset:#x}" in probed.kernel.kprobes.reason(outer)
        probed.settle()
        assert [probed.kernel.kprobes.mode(probe) for probe in (outer, inner)] == ["int3", "optimized"]
        assert probed.gcd() == [HIT, INNER]

    def test_it_comes_back_only_when_asked_for(self, probed: Probed) -> None:
        """As in Linux, a probe that lost its jump to a probe in its region stays a breakpoint when the other
        probe is unregistered.

        The jump comes back when the probe is enabled again.
        """
        outer = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        inner = probed.probe("gcd", GCD_TAIL, post_handler=lambda _kp, _regs: None)
        assert probed.kernel.kprobes.mode(outer) == "int3"
        probed.kernel.unregister_kprobe(inner)
        probed.settle()
        assert "unoptimized for a probe" in probed.kernel.kprobes.reason(outer)
        probed.kernel.disable_kprobe(outer)
        probed.kernel.enable_kprobe(outer)
        probed.settle()
        assert (probed.kernel.kprobes.mode(outer), probed.gcd()) == ("optimized", [HIT])

    @pytest.mark.parametrize(
        ("profile", "arch"),
        [("linux-6.1", "x86_64"), ("linux-6.1", "i386"), ("riscv-optprobes-2023", "riscv64")],
    )
    @pytest.mark.parametrize("settled", [True, False])
    def test_a_disabled_probe_between_hides_no_jump(
        self, boot: Boot, profile: str, arch: str, settled: bool
    ) -> None:
        """If a probe in the region of a jump is armed, the jump is removed, even if a disabled probe is
        between the two.

        Linux checks only the nearest probe before the armed probe, and writes the breakpoint into the jump.
        """
        probed = boot(profile, arch)
        start, between, behind = next(threes(probed))
        outer = probed.probe("", at=start)
        others = [Kprobe(addr=at, disabled=True) for at in (between, behind)]
        probed.kernel.register_kprobes(others)
        if settled:
            probed.settle()
        assert probed.kernel.kprobes.table.runs_in_detour(outer)
        probed.kernel.enable_kprobe(others[1])
        assert not probed.kernel.kprobes.table.runs_in_detour(outer)
        probed.settle()
        text = probed.kernel.machine.text
        for at, armed in ((start, True), (between, False), (behind, True)):
            assert (text.current(at, 1) != text.original(at, 1)) == armed
        assert probed.kernel.kprobes.mode(outer) == "int3"

    def test_a_disabled_probe_keeps_no_jump_that_is_on_its_way_out(self, probed: Probed) -> None:
        first = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        probed.kernel.unregister_kprobe(first)
        second = probed.probe("gcd", GCD_HEAD, disabled=True)
        assert probed.gcd() == []
        probed.kernel.unregister_kprobe(second)
        probed.settle()
        assert probed.kernel.machine.text.ledger == {}
        assert probed.gcd() == []

    @pytest.mark.parametrize("number", [1, 2])
    def test_disabled_probes_get_their_detour_when_one_is_enabled_or_asked_for(
        self, probed: Probed, number: int
    ) -> None:
        kprobes = probed.kernel.kprobes
        probes = [probed.probe("gcd", GCD_HEAD, disabled=True) for _ in range(number)]
        head = kprobes.table.valid(probes[0])
        assert head is not None
        assert head.detour is None
        assert kprobes.detour(probes[-1]) is head.detour is not None
        for probe in probes:
            probed.kernel.unregister_kprobe(probe)
        probes = [probed.probe("gcd", GCD_HEAD, disabled=True) for _ in range(number)]
        probed.kernel.enable_kprobe(probes[0])
        probed.settle()
        assert (kprobes.mode(probes[0]), probed.gcd()) == ("optimized", [HIT])

    def test_a_probe_that_joins_disabled_ones_is_optimized(self, probed: Probed) -> None:
        others = [probed.probe("gcd", GCD_HEAD, disabled=True) for _ in range(2)]
        enabled = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        assert (probed.kernel.kprobes.mode(enabled), probed.gcd()) == ("optimized", [HIT])
        for probe in (enabled, *others):
            probed.kernel.unregister_kprobe(probe)
        probed.settle()
        assert probed.kernel.machine.text.ledger == {}

    def test_an_armed_probe_inside_prevents_it(self, probed: Probed) -> None:
        probed.probe("gcd", GCD_TAIL)
        probed.settle()
        outer = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        assert (probed.kernel.kprobes.mode(outer), probed.gcd()) == ("int3", [HIT, INNER])

    def test_a_jump_into_the_middle_prevents_it(self, probed: Probed) -> None:
        """A probe stays a breakpoint if a jump of the function leads into its region, as in the loops of gcd;
        `reason` names the jump.
        """
        reasons = set()
        start = probed.address("gcd")
        for offset in range(5, 120):
            outcome = probed.verdict.optimized_region(start + offset)
            if isinstance(outcome, Rejection) and "leads into" in outcome.text:
                reasons.add(offset)
        assert reasons
        boundaries = probed.kernel.machine.text.original(start, 120)
        arch = probed.kernel.arch
        offset = next(
            o for o in sorted(reasons) if start + o in arch.instruction_boundaries(boundaries, start)
        )
        probe = probed.probe("gcd", offset)
        probed.settle()
        assert probed.kernel.kprobes.mode(probe) == "int3"
        assert "a jump here leads into" in probed.kernel.kprobes.reason(probe)

    def test_no_memory_for_a_detour(self, probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
        from emulated_kernel.machine.traps.trap import HardwareError

        text = probed.kernel.machine.text
        alloc = text.alloc_text

        def scarce(size: int, starts: range | None = None) -> int:
            if size == probed.kernel.arch.max_detour:
                raise HardwareError("none left")
            return alloc(size, starts)

        monkeypatch.setattr(text, "alloc_text", scarce)
        probe = probed.probe("gcd", GCD_HEAD)
        assert (probed.flags(), probed.gcd()) == ({"gcd+0x5": ""}, [HIT])
        assert "no executable memory" in probed.kernel.kprobes.reason(probe)

    def test_no_memory_for_a_slot(self, probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
        from emulated_kernel.machine.traps.trap import HardwareError

        def none(_size: int, _starts: range | None = None) -> int:
            raise HardwareError("none left")

        monkeypatch.setattr(probed.kernel.machine.text, "alloc_text", none)
        with pytest.raises(KernelError) as caught:
            probed.probe("gcd", GCD_HEAD)
        assert caught.value.errno == errno.ENOMEM
        assert probed.flags() == {}


class TestQuiescence:
    def test_nothing_is_patched_or_freed_before_it(self, probed: Probed) -> None:
        clear: list[bool] = [False]
        asked: list[list[tuple[int, int]]] = []

        def is_quiescent(spans: Any) -> bool:
            asked.append(list(spans))
            return clear[0]

        script(probed.kernel).quiescent_in = is_quiescent
        probe = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        head = probed.kernel.kprobes.table.valid(probe)
        assert head is not None
        assert head.insn is not None
        slot, size = head.insn.slot, probed.kernel.arch.max_insn_size
        assert slot is not None
        assert set(asked[-1]) == {(probe.address + 1, probe.address + 6), (slot, slot + size)}
        assert (probed.kernel.kprobes.mode(probe), probed.optimizer.work.due is not None) == ("int3", True)
        assert "no CPU or task is in code" in probed.kernel.kprobes.reason(probe)
        clear[0] = True
        probed.settle()
        assert probed.kernel.kprobes.mode(probe) == "optimized"
        used = probed.kernel.machine.text._slots.used
        clear[0] = False
        probed.kernel.unregister_kprobe(probe)
        probed.settle()
        assert probed.kernel.machine.text.ledger == {}
        assert probed.kernel.machine.text._slots.used == used
        again = probed.probe("gcd", GCD_HEAD)
        clear[0] = True
        probed.settle()
        assert (probed.kernel.kprobes.mode(again), probed.gcd()) == ("optimized", [HIT])
        assert probed.kernel.machine.text._slots.used == used

    def test_what_leads_into_the_region_of_another_probe_is_waited_for(self, probed: Probed) -> None:
        """The optimizer waits until no CPU is in a detour or slot of another probe that leads into the region
        of the new jump.
        """
        first = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        second = probed.probe("gcd", GCD_TAIL)
        asked: list[tuple[int, int]] = []
        script(probed.kernel).quiescent_in = lambda spans: asked.extend(spans) or True
        probed.optimizer.work.flush()
        assert probed.kernel.kprobes.mode(second) == "optimized"
        detour = probed.kernel.kprobes.detour(first)
        assert detour is not None
        head = probed.kernel.kprobes.table.valid(first)
        assert head is not None
        assert head.insn is not None
        assert (detour.address, detour.address + detour.size) in asked
        assert head.insn.slot in [start for start, _ in asked]

    def test_an_address_on_a_stack_delays(self, probed: Probed) -> None:
        """An address in the region that is on a stack delays the jump, because the registers of an
        interrupted task are on its stack.
        """
        kernel = probed.kernel
        probe = probed.probe("gcd", GCD_HEAD)
        sp = kernel.machine.regs.sp
        before = kernel.machine.memory.read_u64(sp - 8)
        kernel.machine.memory.write_word(sp - 8, probe.address + 3)
        kernel.machine.regs.sp = sp - 8
        probed.settle()
        assert kernel.kprobes.mode(probe) == "int3"
        kernel.machine.memory.write_word(sp - 8, before)
        kernel.machine.regs.sp = sp
        probed.settle()
        assert kernel.kprobes.mode(probe) == "optimized"


class TestRemoval:
    def test_the_jump_goes_later(self, probed: Probed) -> None:
        probe = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        probed.kernel.unregister_kprobe(probe)
        assert (probed.flags(), probed.text("gcd", GCD_HEAD)[0], probed.gcd()) == ({}, 0xE9, [])
        probed.settle()
        assert probed.kernel.machine.text.ledger == {}
        assert len(probed.kernel.machine.breakpoints) == 2, "the trampoline's and the tracepoints'"

    def test_a_new_probe_rescues_it(self, probed: Probed) -> None:
        first = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        detour = probed.kernel.kprobes.detour(first)
        probed.kernel.unregister_kprobe(first)
        second = probed.probe("gcd", GCD_HEAD)
        assert probed.kernel.kprobes.detour(second) is detour
        assert (probed.kernel.kprobes.mode(second), probed.gcd()) == ("optimized", [HIT])
        probed.settle()
        assert probed.kernel.kprobes.mode(second) == "optimized"

    def test_enabled_again_in_time_it_keeps_the_jump(self, probed: Probed) -> None:
        probe = probed.probe("gcd", GCD_HEAD)
        probed.settle()
        jump = probed.text("gcd", GCD_HEAD)
        probed.kernel.disable_kprobe(probe)
        probed.kernel.enable_kprobe(probe)
        assert (probed.text("gcd", GCD_HEAD), probed.gcd()) == (jump, [HIT])
        probed.settle()
        assert (probed.text("gcd", GCD_HEAD), probed.gcd()) == (jump, [HIT])

    def test_queued_and_taken_back(self, probed: Probed) -> None:
        probe = probed.probe("gcd", GCD_HEAD)
        probed.kernel.unregister_kprobe(probe)
        assert probed.kernel.machine.text.ledger == {}
        probed.settle()
        assert probed.gcd() == []

    def test_leaves_no_memory_behind(self, probed: Probed) -> None:
        """After optimized probes are unregistered, no executable memory stays allocated, except the page of
        slots that the kernel keeps.
        """
        probed.kernel.unregister_kprobe(probed.probe("gcd", 5))
        probed.settle()
        used = probed.kernel.machine.text._slots.used
        probes = [probed.probe("gcd", offset) for offset in (0, GCD_HEAD, GCD_TAIL, GCD_HEAD, 0)]
        probed.settle()
        probed.gcd()
        for probe in probes:
            probed.kernel.unregister_kprobe(probe)
        probed.settle()
        assert probed.kernel.machine.text._slots.used == used
        assert probed.kernel.kprobes.slots.used == 0


class TestHolding:
    """The file stats/.../optimized allows or prevents the jump of a single probe."""

    def test_hold_and_ask_again(self, probed: Probed) -> None:
        kprobes, probe = probed.kernel.kprobes, probed.probe("gcd", GCD_HEAD)
        probed.settle()
        kprobes.set_optimized(probe, False)
        assert (kprobes.mode(probe), probed.flags()) == ("int3", {"gcd+0x5": ""})
        kprobes.set_optimization(False)
        kprobes.set_optimization(True)
        probed.settle()
        assert kprobes.mode(probe) == "int3"
        assert "held" in kprobes.reason(probe)
        kprobes.set_optimized(probe, True)
        assert (kprobes.mode(probe), kprobes.reason(probe)) == ("optimized", "")

    @pytest.mark.parametrize(("offset", "options"), [(0, {}), (88, {}), (GCD_HEAD, {"post_handler": print})])
    def test_refused(self, probed: Probed, offset: int, options: dict[str, Any]) -> None:
        probe = probed.probe("strlen" if offset == 88 else "gcd", 5 if offset == 88 else offset, **options)
        probed.kernel.kprobes.set_optimized(probe, False)
        with pytest.raises(KernelError) as caught:
            probed.kernel.kprobes.set_optimized(probe, True)
        assert caught.value.errno == errno.EOPNOTSUPP


def test_without_an_optimizer(boot: Callable[[str], Probed]) -> None:
    probed = boot("kprobes-2010")
    kprobes = probed.kernel.kprobes
    probe = probed.probe("gcd", GCD_HEAD)
    assert kprobes.optimizer is None
    assert "without jump optimization" in kprobes.reason(probe)
    with pytest.raises(KernelError) as caught:
        kprobes.set_optimization(True)
    assert caught.value.errno == errno.EOPNOTSUPP
    with pytest.raises(KernelError) as caught:
        kprobes.set_optimized(probe, True)
    assert caught.value.errno == errno.EOPNOTSUPP
