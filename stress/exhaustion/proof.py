"""Proof of all stages of patching a probed region, with CPUs at every possible position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from unittest.mock import patch

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.guest_code import DetourBuffer
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.text.stale_fetch import Prefetch
from stress.exhaustion.standing import CpuState, OtherCpu
from tests.arch.decoding import starts_with_breakpoint
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import Bench, Pieces, State, exits, live_at_exit, loose_flags, piece_size
from tests.kprobes.scripted import script

Spans = Sequence[tuple[int, int]]
Group = list[list[CpuState]]
"""The possible states of each CPU. All groups of a place list the CPUs in the same order."""
PUSH_FLAGS = b"\x9c"
"""Machine code of pushf, which pushes the flags with TF if it is single-stepped."""


class Watch(Prefetch):
    """Calls `before_sync` before all CPUs are synchronized, while they may still execute stale bytes."""

    before_sync: Callable[[], None] = staticmethod(lambda: None)

    def synchronised(self) -> None:
        """Call `before_sync`, and then forget all text writes that happened before the synchronization."""
        self.before_sync()
        super().synchronised()


@dataclass
class Proof:
    """Checks places one after the other, and appends a line to `problems` for each problem."""

    probed: Probed
    states: int = 1
    problems: list[str] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self) -> None:
        self.bench = Bench(self.probed)
        self.scheduler = script(self.probed.kernel)
        text = self.probed.kernel.machine.text
        self.watch = text.watcher = Watch(text, self.probed.kernel.machine.model.fetch_unit)

    def count(self) -> int:
        """Return the number of hits that have been handled."""
        return len(self.probed.hits)

    def own(self) -> Pieces:
        """Return the address and the contents of per-CPU cells that handlers write."""
        return ()

    def _comes_back(self, start: State, leads_to: Sequence[int]) -> bool:
        """Return True if a CPU comes back to the probe by one of the instructions that the jump keeps."""
        region = self.probed.verdict.optimized_region(start.ip)
        if isinstance(region, Rejection) or not region.kept:
            return False
        with self.bench.until(*leads_to, region.end):
            reached = self.bench.run(start)
        if reached.registers is None or reached.met != region.end:
            return False
        with self.bench.until(*leads_to, region.addr):
            return self.bench.run(reached.registers._replace(ip=region.end)).met == region.addr

    @property
    def has_jumps(self) -> bool:
        """Whether the optimizer writes jumps; if not, a probe is only armed and disarmed."""
        kprobes = self.probed.kernel.kprobes
        return kprobes.optimizer is not None and kprobes.profile.djprobe is None

    def length(self, address: int) -> int:
        """Return the size in bytes of the whole instructions that a jump covers or would cover."""
        return piece_size(self.probed, self.probed.region(address))

    def place(self, address: int, cpus: Sequence[OtherCpu]) -> Place:
        """Return a Place for the region at `address`; its run() checks all stages of patching with `cpus`."""
        return Place(self, address, cpus)

    @property
    def only_live(self) -> bool:
        """Whether a hit preserves only the registers that may be read after it."""
        return False

    def live_at(self, addr: int) -> LiveRegisters:
        """Return the registers and flags that a hit at an address preserves."""
        return self.probed.verdict.live_at(addr) if self.only_live else self.bench.all_live

    def live_after(self, address: int, end: int | None) -> LiveRegisters:
        """Return the registers and flags that must have the same values at an exit of a region.

        `end`: address of the exit, or None for a return. The scratch registers of the jumps may differ if no
        instruction reads them after the region. Registers that are dead before a return are dead after it.
        """
        verdict = self.probed.verdict
        behind = verdict.live_at(address) if end is None else live_at_exit(self.probed, address, end)
        live = behind if self.only_live and end is not None else self.bench.all_live
        region = verdict.optimized_region(address)
        if isinstance(region, Rejection) or region.scratch is None or not self.has_jumps:
            return live
        needed = behind.registers
        if end in verdict.mcount:
            # The fentry site overwrites this register while its function is traced.
            needed -= {self.probed.kernel.arch.call_link}
        free = {region.scratch.entry, region.scratch.exit} - needed
        return replace(live, registers=live.registers - free)

    def loose_flags(self, address: int, size: int) -> int:
        """Return the flags that may differ, because the code of a region leaves them undefined.

        `address`, `size`: address of the region, and its size in bytes.
        """
        arch = self.probed.kernel.arch
        if not self.bench.all_live.flags:
            return 0
        code = self.probed.kernel.machine.text.original(address, size)
        return loose_flags(code, address, arch.bits, live=self.live_at(address).flags)

    def check(self, place: tuple[str, int, int]) -> None:
        """Check one place, given as symbol, offset and address, and append its problems."""
        symbol, offset, address = place
        region = self.length(address)
        leads_to = exits(self.probed, address, region)
        with self.bench.until(*leads_to):
            states = (s._replace(ip=address) for s in self.bench.states(address))
            # Skip random states that read below the stack pointer: they would read the detour's frame, which
            # no real function does.
            usable = [state for state in states if not self.bench.reads_below_stack(state)]
        starts = [*islice((s for s in usable if not self._comes_back(s, leads_to)), self.states)]
        behind = partial(self.live_after, address), self.loose_flags(address, region)
        made = self.probed, self.bench, leads_to
        cpus = [OtherCpu(*made, at, self.count, self.own, *behind) for at in starts]
        before = len(self.problems)
        self.place(address, cpus).run()
        self.probed.hits.clear()
        self.problems[before:] = [f"{symbol}+{offset:#x}: {line}" for line in self.problems[before:]]


@dataclass
class Place:
    """One region, with the CPUs that are about to execute it."""

    proof: Proof
    address: int
    cpus: Sequence[OtherCpu]

    def __post_init__(self) -> None:
        self.probed = self.proof.probed
        self.kernel, self.scheduler = self.probed.kernel, self.proof.scheduler
        self.in_jump: Group = [[] for _ in self.cpus]
        """States of CPUs that have executed a part of the jump.

        After a synchronization, only the states remain in which the CPU may be interrupted.
        """
        self.in_kept: Group = [[] for _ in self.cpus]
        """States of CPUs at instructions that the jump covers but keeps; no stage waits for them."""
        self.is_sole = False
        """Whether the probe has no aggregator probe. Then it is marked as disabled after it is disarmed."""

    def run(self) -> None:
        """Arm and unregister a probe, and optimize it if there are jumps; check all CPUs in each step."""
        kernel, has_jumps = self.kernel, self.proof.has_jumps
        inside = [self._after_each(cpu, cpu.end - self.address, "interior", 0) for cpu in self.cpus]
        region = self.probed.region(self.address)
        replaced = range(region.addr, region.end)
        interiors = [[at for at in group if at.ip in replaced] for group in inside]
        self.in_kept = [[at for at in group if at.ip not in replaced] for group in inside]
        self.probe = self._register()
        self.head = self._head()
        self.is_sole = not self.head.is_aggregated
        if has_jumps:
            self._hold(True)
        slots = [self._slot(cpu) for cpu in self.cpus]
        if not has_jumps or self._breakpoint_size() > len(kernel.arch.breakpoint):
            around = joined(interiors, slots)
            self._watched("disarming", lambda: kernel.disable_kprobe(self.probe), around, hits=0)
            self._watched("arming", lambda: kernel.enable_kprobe(self.probe), around)
        if has_jumps:
            self._optimize(interiors, slots)
        else:
            self._remove(interiors, joined(slots, self._stubs()))

    def _optimize(self, interiors: Group, slots: Group) -> None:
        """Optimize, unoptimize, optimize again and unregister the probe.

        `interiors`, `slots`: states of CPUs inside the region, and in the instruction slot.
        """
        kernel = self.kernel
        self._delays(interiors, joined(slots, self._stubs()))
        self._watched("optimizing", lambda: self._hold(False))
        if not self.head.is_patched:
            self.proof.problems.append(f"not optimized: {kernel.kprobes.reason(self.probe)}")
        detours = [self._detour(cpu) for cpu in self.cpus]
        self._all("optimized", detours)
        detours = self._handled_otherwise(detours)
        self._watched("unoptimizing", lambda: self._hold(True), detours)
        self._all("unoptimized", joined(detours, slots))
        self._watched("optimizing again", lambda: self._hold(False), detours)
        self._leave(detours)

    def _stubs(self) -> Group:
        """Return the CPUs in code that a hit of the breakpoint executes before the slot."""
        return [[] for _ in self.cpus]

    def _register(self) -> Kprobe:
        return self.probed.probe("probe", at=self.address)

    def _breakpoint_size(self) -> int:
        insn = self.head.insn
        assert insn is not None
        return len(self.kernel.arch.breakpoint_for(insn.prepared.length))

    def _handled_otherwise(self, detours: Group) -> Group:
        """Run additional stages while the probe is optimized, and return the CPUs in detours afterwards."""
        return detours

    # Possible positions of a CPU

    def _after_each(self, cpu: OtherCpu, size: int, what: str, hits: int) -> list[CpuState]:
        """Return the states of a CPU after each instruction except the last one at the probe.

        The instructions are `size` bytes of the current text. `what`: description of the states. `hits`:
        number of hits that the CPU will still have in these states.
        """
        code = self.kernel.machine.text.current(self.address, size)
        inner = self.kernel.arch.instruction_boundaries(code, self.address)[1:]
        return self._met(cpu, inner, self.address, f"{what} +", hits)

    def _inside_jump(self) -> Group:
        """Return the states of CPUs that have executed a part of the current jump."""
        size = len(self._buffer().jump) if self.head.is_patched else 0
        return [self._after_each(cpu, size, "jump", 1) for cpu in self.cpus]

    def _stays(self, standing: CpuState) -> bool:
        """Return True if a CPU may still be in the state `standing` after the synchronization of all CPUs.

        An interrupt synchronizes the CPU, so the CPU must be interruptible at this address.
        """
        regs = self.kernel.machine.regs
        here, regs.ip = regs.ip, standing.ip
        stays = self.kernel.kprobes.hits.may_interrupt()
        regs.ip = here
        return stays

    def _slot(self, cpu: OtherCpu) -> list[CpuState]:
        insn = self.head.insn
        assert insn is not None
        if insn.slot is None or insn.step_end is None:
            return []
        return self._met(cpu, (insn.slot, insn.step_end), insn.slot, "slot +", 1)

    def _detour(self, cpu: OtherCpu) -> list[CpuState]:
        detour = self._buffer()
        return self._inside(cpu, detour.address, detour.size, "detour")

    def _inside(self, cpu: OtherCpu, address: int, size: int, what: str) -> list[CpuState]:
        """Return the states of a CPU at each instruction of code that it executes at a hit.

        `address`, `size`: the code. `what`: description of the states.
        """
        code = self.kernel.machine.text.current(address, size)
        boundaries = self.kernel.arch.instruction_boundaries(code, address)
        return self._met(cpu, boundaries, address, f"{what} +", 1)

    def _met(
        self, cpu: OtherCpu, addresses: Sequence[int], base: int, what: str, hits: int
    ) -> list[CpuState]:
        if not addresses:
            return []
        with cpu.running():
            return cpu.standings({addr: f"{what}{addr - base:#x}" for addr in addresses}, hits)

    # Changes of the probe

    def _hold(self, held: bool) -> None:
        self.probed.optimizer.hold(self.head, held)

    def _delays(self, interiors: Group, slots: Group) -> None:
        """Check that nothing is patched while a CPU is in the region or slot, and that the CPU continues.

        `interiors`, `slots`: states of CPUs inside the region, and in the slot.
        """
        standings = joined(interiors, slots)
        patched: list[bool] = []

        def is_quiescent(spans: Spans) -> bool:
            inside = all(any(a <= at.ip < b for a, b in spans) for group in standings for at in group)
            patched.append(inside)
            return False

        self.scheduler.quiescent_in = is_quiescent
        self._hold(False)
        self._all("queued", standings)
        if self.head.is_patched or patched != [True]:
            self.proof.problems.append("a CPU in the region or slot isn't waited for")
        self._hold(True)
        self.scheduler.quiescent_in = lambda _spans: True

    def _remove(self, interiors: Group, slots: Group) -> None:
        """Unregister the probe, and check that its slot and code are kept until all CPUs have left them.

        `interiors`, `slots`: states of CPUs inside the region, and in the slot.
        """
        waited: list[bool] = []

        def occupied(spans: Spans) -> Spans:
            waited.append(all(any(a <= at.ip < b for a, b in spans) for group in slots for at in group))
            return spans

        self.scheduler.occupied_of = occupied
        around = joined(interiors, slots)
        self._all("armed", around)
        self._check_hits_counted(slots)
        with self._with_states(chain(*slots)):
            self._watched("unregistering", self._unregister, around, hits=0)
        self._all("unregistered", around, hits=0)
        if waited[-1:] != [True] and any(slots):
            self.proof.problems.append("a CPU in the slot isn't waited for")
        self.scheduler.occupied_of = lambda _spans: ()
        self.probed.settle()

    def _check_hits_counted(self, slots: Group) -> None:
        """Check that each CPU in a slot or in guest code is counted as a hit that has not ended."""
        assert self.head.insn is not None
        if self.head.insn.boosted:
            # The slot is kept for CPUs in any case.
            return
        for at in chain(*slots):
            with self._with_states([at]):
                is_seen = self.kernel.kprobes.hits.is_underway
            self._note("armed", None if is_seen else f"a CPU at {at.what} is not seen")

    def _with_states(self, standings: Iterable[CpuState]) -> AbstractContextManager[object]:
        """Make the machine report that its CPUs are in these states, during the `with` block."""
        positions = [(at.registers.ip, at.registers.sp) for at in standings]
        return patch.object(self.kernel.machine, "positions", lambda: positions)

    def _leave(self, detours: Group) -> None:
        """Unregister the probe, and check that the detour is kept until all CPUs have left it."""
        waited: list[bool] = []

        def is_quiescent(spans: Spans) -> bool:
            waited.append(all(any(a <= at.ip < b for a, b in spans) for group in detours for at in group))
            return False

        self.scheduler.quiescent_in = is_quiescent
        in_detour = [[self._leaving(standing) for standing in group] for group in detours]
        self.in_jump = [[self._leaving(standing) for standing in group] for group in self.in_jump]
        self._watched("unregistering", self._unregister, in_detour, hits=0)
        self._all("unregistered", in_detour, hits=0)
        if waited[-1:] != [True]:
            self.proof.problems.append("a CPU in the detour isn't waited for")
        self.scheduler.quiescent_in = lambda _spans: True
        self.probed.settle()

    def _leaving(self, standing: CpuState) -> CpuState:
        """Return the CPU's state `standing` as it is after the probe was unregistered: no hit is to come."""
        return CpuState(standing.what, standing.registers, standing.memory, 0)

    def _unregister(self) -> None:
        self.kernel.unregister_kprobe(self.probe)
        self.probed.settle()

    # Looking

    def _watched(
        self,
        what: str,
        action: Callable[[], None],
        others: Group | None = None,
        hits: int = 1,
    ) -> None:
        """Run `action`. Before each synchronization of the CPUs, check that each of them can continue.

        `what`: description for a problem. `others`: states of CPUs elsewhere. `hits`: number of hits of a CPU
        that executes the armed probe.
        """
        self.moment = 0

        def look() -> None:
            self.moment += 1
            self._all(f"{what}, {self.moment}", others, hits)
            self.in_jump = [[at for at in group if self._stays(at)] for group in self.in_jump]

        self.proof.watch.before_sync = look
        try:
            action()
        finally:
            self.proof.watch.before_sync = lambda: None
        self.in_jump = joined(self.in_jump, self._inside_jump())

    def _all(self, stage: str, others: Group | None, hits: int = 1) -> None:
        now = self.kernel.machine.text.current(self.address, self.kernel.arch.max_insn_size)
        for number, cpu in enumerate(self.cpus):
            at_start = cpu.at_start(self._hits(now, hits))
            inside = (*self.in_jump[number], *self.in_kept[number])
            windows = self._windows(self.address)
            in_windows = [(at, window) for at in inside for window in self._windows(at.ip, changed=True)]
            with cpu.running():
                for standing in (at_start, *(others[number] if others else ()), *inside):
                    self._note(stage, cpu.problem(standing))
                for window in windows:
                    self._note(stage, self._stale(cpu, at_start, window))
                for standing, window in in_windows:
                    self._note(stage, cpu.stale_problem(standing, window, self._jumps().values()))

    def _hits(self, code: bytes, hits: int) -> int:
        """Return the number of hits of a CPU that executes `code` at the probe: usually `hits`.

        The number is 1 if the probe has no aggregator probe and `code` begins with the breakpoint.
        """
        return 1 if self.is_sole and starts_with_breakpoint(self.kernel.arch, code) else hits

    def _windows(self, address: int, *, changed: bool = False) -> set[bytes]:
        """Return the variants of the bytes at `address` that a CPU may have fetched since the last sync.

        On an architecture with a trap flag, variants with a pushf are left out, because a single step changes
        the flags that it pushes. With `changed`, return an empty set if no write since then concerns these
        bytes.
        """
        watch = self.proof.watch
        if changed and not watch.concerns(address):
            return set()
        traps = self.kernel.arch.trap_flag
        return {window for window in watch.windows(address) if not (traps and PUSH_FLAGS in window)}

    def _stale(self, cpu: OtherCpu, at_start: CpuState, window: bytes) -> str | None:
        jumps = self._jumps()
        at_start = replace(at_start, hits=self._hits(window, at_start.hits))
        if starts_with_breakpoint(self.kernel.arch, window) or window.startswith(tuple(jumps)):
            return cpu.stale_problem(at_start, window, jumps.values())
        # A CPU that executes the original instruction has passed without a hit.
        passed = CpuState(at_start.what, at_start.registers, (), 0)
        return cpu.stale_problem(passed, window, jumps.values())

    def _jumps(self) -> dict[bytes, int]:
        """Return a map bytes of a jump that may be at the probe -> destination of the jump."""
        if not self.proof.has_jumps:
            return {}
        buffer = self._buffer()
        return {buffer.jump: buffer.address}

    def _note(self, stage: str, problem: str | None) -> None:
        self.proof.runs += 1
        if problem is not None:
            self.proof.problems.append(f"{stage}: {problem}")

    def _head(self) -> AggrKprobe:
        head = self.kernel.kprobes.table.valid(self.probe)
        assert head is not None
        return head

    def _buffer(self) -> DetourBuffer:
        detour = self.head.detour
        assert detour is not None
        return detour


def joined(some: Group, others: Group) -> Group:
    """Return, for each CPU, its states in `some` and then those in `others`."""
    return [a + b for a, b in zip(some, others, strict=True)]
