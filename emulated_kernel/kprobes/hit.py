"""The hit state machine: from the breakpoint, the detour or the fentry call back into the probed code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from emulated_kernel.abi import Vector
from emulated_kernel.arch.base import Arch, ByteMemory
from emulated_kernel.kprobes.compiled import CompiledCode, Compiler
from emulated_kernel.kprobes.ctlblk import HitStatus, KprobeCtlblk
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe, OutOfLine, Regs
from emulated_kernel.kprobes.profile import Profile, Stepper
from emulated_kernel.kprobes.saved_regs import SavedFrames
from emulated_kernel.machine.traps import HardwareError, MemoryFault, Trap

_log = logging.getLogger(__name__)


class HitMemory(ByteMemory, Protocol):
    def view(self, va: int, size: int, /) -> memoryview: ...


class HitMachine(Protocol):
    """What handling a hit needs of the machine."""

    @property
    def breakpoints(self) -> dict[int, Callable[[Any], None]]: ...

    @property
    def memory(self) -> HitMemory: ...

    @property
    def regs(self) -> Any: ...

    def raise_fault(self, fault: MemoryFault, /) -> object: ...


Resume = Callable[[Regs, bool], None]
"""Goes on behind a breakpoint; the flag tells of a hit within the handling of another one."""


class HitHandling:
    """Installs what runs when a CPU meets a probe, or the end of its step.

    Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_int3_handler, opt.c:optimized_callback,
    ftrace.c:kprobe_ftrace_handler (v6.1). Deviates: the interrupt flag isn't cleared around the step;
    instead `may_interrupt` keeps the machine from delivering one.
    """

    def __init__(self, machine: HitMachine, arch: Arch, profile: Profile, compiler: Compiler) -> None:
        self._machine = machine
        self._compiler = compiler
        self.redirect: Callable[[AggregatorProbe, bytes], None] = lambda _head, _jump: None
        """Writes the jump of an optimized probe anew, to another detour."""
        self.is_patching: Callable[[], bool] = lambda: False
        """Whether a hit has to leave text alone: it is being patched, or another CPU stands within a jump."""
        self.is_in_jump: Callable[[int], bool] = lambda _ip: False
        """Whether a CPU there has executed the first of the instructions that are patched as one."""
        self.redirect_call: Callable[[Kprobe, int | None], None] = lambda _kprobe, _entry: None
        """Writes the call of an fentry site anew: None leads to the trampoline."""
        self.return_at = 0
        """Address of a return instruction."""
        self.breakpoints = machine.breakpoints
        self.memory = machine.memory
        self._arch = arch
        self._trap_flag = arch.trap_flag if profile.stepper is Stepper.TRAP_FLAG else 0
        self._frames = SavedFrames(machine.memory, arch.pt_regs, arch.word_size)
        self._general = frozenset(arch.pt_regs).intersection(machine.regs.snapshot()._fields)
        self._routed: dict[int, Kprobe] = {}
        self._first_hit = self._route_first_hit
        """One object for all probes."""
        self._calls: dict[int, Callable[[Regs], None]] = {}
        """What a call from an fentry site does, by the address behind it: tracers, then the probe."""
        self._callers: dict[int, Kprobe] = {}
        self._probed: dict[int, Callable[[Regs], None]] = {}
        self._traced: dict[int, tuple[Callable[[Regs], None], ...]] = {}
        self.ctlblk = KprobeCtlblk()
        self.on_call = self._make_on_call()
        """Handles the trap of ftrace's trampoline."""
        self._failure: BaseException | None = None

    def report(self, kprobe: Kprobe, error: BaseException) -> None:
        """A handler raised: the hit goes on as if it had returned 0, and the first of a probe is logged.

        A fault in guest memory is offered to its fault_handler, and counts as missed, as in Linux (v5.13).
        The guest can't be left in the middle of a hit, and the other handlers have a right to theirs.
        """
        if isinstance(error, MemoryFault) and kprobe.fault_handler is not None:
            kprobe.nmissed += 1
            if kprobe.run_fault_handler(self._machine.regs, Vector.PAGE_FAULT):
                return
        kprobe.failures += 1
        self.note_failure(error, kprobe.address, is_first=kprobe.failures == 1)

    def note_failure(self, error: BaseException, address: int, *, is_first: bool) -> None:
        """Keep what a handler raised for `take_failure`, and log it once a probe."""
        self._failure = self._failure or error
        if is_first:
            _log.error("a handler of the probe at %#x failed", address, exc_info=error)

    def take_failure(self) -> BaseException | None:
        """What the first handler raised that failed since the last call, for a caller to raise."""
        failure, self._failure = self._failure, None
        return failure

    def may_interrupt(self) -> bool:
        """False from a hit until its step has ended: the slot's registers belong to nobody else.

        Nor in a compiled handler, which may have written half a record, nor between instructions of a jump or
        call that may be taken back. Linux: where those are two, nothing is preempted, so that no task is
        between them while they are patched.
        """
        ip = self._machine.regs.ip
        return self.ctlblk.running is None and not self._compiler.contains(ip) and not self.is_in_jump(ip)

    # What is routed where

    def install(self, kprobe: Kprobe) -> None:
        """Route all ways into the probe as its state is now; again after each change of that.

        Of many probes few are ever hit: what takes the hits is made at the first one.
        """
        insn = kprobe.insn
        if insn is None:
            if self._behind(kprobe) in self._probed:
                self.call_from(kprobe)
            return
        if kprobe.stub is not None and kprobe.stub.target != self._target(kprobe):
            self._drop_stub(kprobe)
        self._lead(kprobe.address, kprobe)
        step_end = insn.step_end
        if step_end is not None and not self._trap_flag:
            self._lead(step_end, kprobe)
        detour = kprobe.detour if isinstance(kprobe, AggregatorProbe) else None
        if detour is None:
            return
        if kprobe.is_disabled:
            # Linux: a probe that is disabled, but not unoptimized yet, is passed through.
            self.pass_detour(detour.trap)
        else:
            self._lead(detour.trap, kprobe)

    def _lead(self, trap: int, kprobe: Kprobe) -> None:
        """Let the breakpoint there lead to the probe."""
        self._routed[trap] = kprobe
        self.breakpoints[trap] = self._first_hit

    def _forget(self, trap: int) -> None:
        self.breakpoints.pop(trap, None)
        self._routed.pop(trap, None)

    def _route_first_hit(self, regs: Regs) -> None:
        trap = regs.ip - len(self._arch.breakpoint)
        taken = self.breakpoints[trap] = self._way(trap, self._routed[trap])
        taken(regs)

    def _way(self, trap: int, kprobe: Kprobe) -> Callable[[Regs], None]:
        """What takes the breakpoint there, one of those that lead to the probe."""
        if trap == kprobe.address:
            return self._route(kprobe)
        if kprobe.insn is not None and trap == kprobe.insn.step_end:
            return self._on_step_end(kprobe)
        assert isinstance(kprobe, AggregatorProbe)
        return self._on_detour(kprobe)

    def drop_code(self, kprobe: Kprobe) -> None:
        """Let Python take the hits again, until the next one: what the handlers do has changed."""
        kprobe.is_python = False
        self._drop_stub(kprobe)
        if kprobe.code is None:
            return
        code, kprobe.code = kprobe.code, None
        if isinstance(kprobe, AggregatorProbe) and kprobe.is_patched:
            assert kprobe.detour is not None
            self.redirect(kprobe, kprobe.detour.jump)
        elif self._behind(kprobe) in self._calls:
            self.redirect_call(kprobe, None)
        self._compiler.retire(code)

    def _drop_stub(self, kprobe: Kprobe) -> None:
        if kprobe.stub is not None:
            self._compiler.retire(kprobe.stub)
            kprobe.stub = None

    def remove(self, kprobe: Kprobe) -> None:
        """Nothing leads to the probe any more; its detour goes by `remove_detour`."""
        self.drop_code(kprobe)
        if self._routed.get(kprobe.address) is kprobe:
            self._forget(kprobe.address)

    def remove_step_end(self, insn: OutOfLine) -> None:
        """A slot goes."""
        if insn.step_end is not None:
            self._forget(insn.step_end)

    def pass_detour(self, trap: int) -> None:
        """Nothing leads into a detour any more; who is in it meets no handler."""
        self._routed.pop(trap, None)
        self.breakpoints[trap] = _pass

    def remove_detour(self, trap: int) -> None:
        self._forget(trap)

    def call_from(self, kprobe: Kprobe) -> None:
        """Route the trampoline's calls from the probe's fentry site."""
        behind = self._behind(kprobe)
        self._callers[behind] = kprobe
        self._probed[behind] = self._called(kprobe)
        self._compose_call(behind)

    def forget_call(self, kprobe: Kprobe) -> None:
        behind = self._behind(kprobe)
        self._callers.pop(behind, None)
        self._probed.pop(behind, None)
        self._compose_call(behind)

    def trace_call(self, site: int, tracers: tuple[Callable[[Regs], None], ...]) -> None:
        """Tell these tracers of calls from an fentry site, no others; a probe may be there too.

        A compiled handler, which the site calls by itself, would hide the calls from them.
        """
        behind = site + self._arch.call_size
        kprobe = self._callers.get(behind)
        if kprobe is not None and tracers:
            self.drop_code(kprobe)
        self._traced[behind] = tracers
        if not tracers:
            del self._traced[behind]
        self._compose_call(behind)

    def _compose_call(self, behind: int) -> None:
        probed, tracers = self._probed.get(behind), self._traced.get(behind, ())
        if not tracers:
            if probed is None:
                self._calls.pop(behind, None)
            else:
                self._calls[behind] = probed
            return

        def call(frame: Regs) -> None:
            # First, for the probe may send the task elsewhere.
            for tracer in tracers:
                tracer(frame)
            if probed is not None:
                probed(frame)

        self._calls[behind] = call

    def _behind(self, kprobe: Kprobe) -> int:
        return kprobe.address + self._arch.call_size

    # By a breakpoint

    def _route(self, kprobe: Kprobe) -> Callable[[Regs], None]:
        """What takes a hit by a breakpoint: Python, or the stub that was made for where it goes on."""
        target = self._target(kprobe)
        if kprobe.stub is not None:
            return self._to_stub(kprobe, kprobe.stub)
        hit = self._on_breakpoint(kprobe)
        if kprobe.is_disabled or not kprobe.may_compile:
            return hit

        def first(regs: Regs) -> None:
            kprobe.sample = self._sample(regs)
            hit(regs)
            kprobe.stub = self._compiler.stub(kprobe, target)
            kprobe.is_python = kprobe.stub is None
            self.install(kprobe)

        return first

    def _sample(self, regs: Regs) -> dict[str, int]:
        return {name: getattr(regs, name) for name in self._general}

    def _target(self, kprobe: Kprobe) -> int | None:
        """Where a hit by a breakpoint goes on behind its handlers; None where only Python can do that."""
        if isinstance(kprobe, AggregatorProbe) and kprobe.is_optimized:
            assert kprobe.detour is not None
            return kprobe.detour.copied
        insn = kprobe.insn
        assert insn is not None
        return None if self._trap_flag and not insn.boosted else insn.slot

    def _to_stub(self, kprobe: Kprobe, stub: CompiledCode) -> Callable[[Regs], None]:
        """The handlers, and then the instruction, without coming back; but a step's end is met here."""
        ctlblk, entry = self.ctlblk, stub.entry
        resume = self._resume_for(kprobe)
        insn = kprobe.insn
        assert insn is not None
        steps = stub.target == insn.slot and not insn.boosted
        cost = kprobe.cost
        if stub.target is None:
            self.breakpoints[stub.tail] = lambda regs: resume(regs, False)

        def hit(regs: Regs) -> None:
            if ctlblk.running is not None:
                count_missed(kprobe)
                resume(regs, True)
                return
            if steps:
                cost.start()
                ctlblk.running = kprobe
                ctlblk.status = HitStatus.SINGLE_STEP
            regs.ip = entry

        def hit_and_back(regs: Regs) -> None:
            hit(regs)
            if regs.ip == entry:
                cost.start()
                ctlblk.running = kprobe
                ctlblk.status = HitStatus.ACTIVE

        return hit if stub.target is not None else hit_and_back

    def stub_traps(self, kprobe: Kprobe) -> int:
        """How many traps a hit takes whose handlers are in the probe's stub."""
        insn, stub = kprobe.insn, kprobe.stub
        assert insn is not None
        assert stub is not None
        if stub.target is None:
            return 2 if insn.slot is None else 3
        return 2 if stub.target == insn.slot and not insn.boosted else 1

    def _on_breakpoint(self, kprobe: Kprobe) -> Callable[[Regs], None]:
        ctlblk = self.ctlblk
        resume = self._resume_for(kprobe)
        cost = kprobe.cost
        report = self.report
        seen_ip = kprobe.address + self._arch.seen_ip
        rewinds = self._arch.seen_ip != len(self._arch.breakpoint)

        def hit(regs: Regs) -> None:
            if ctlblk.running is not None:
                # Mirrors: arch/x86/kernel/kprobes/core.c:reenter_kprobe (v6.1).
                count_missed(kprobe)
                resume(regs, True)
                return
            cost.start()
            ctlblk.running = kprobe
            ctlblk.status = HitStatus.ACTIVE
            ctlblk.by_breakpoint = True
            pre_handler = kprobe.pre_handler
            if pre_handler is not None:
                if rewinds:
                    regs.ip = seen_ip
                try:
                    if pre_handler(kprobe, regs):
                        if not kprobe.is_left_open:
                            ctlblk.running = None
                        return
                except BaseException as error:
                    report(kprobe, error)
            resume(regs, False)

        return hit

    def _resume_for(self, kprobe: Kprobe) -> Resume:
        """How the probed instruction is run.

        Mirrors: arch/x86/kernel/kprobes/core.c:setup_singlestep (v6.1).
        """
        insn = kprobe.insn
        assert insn is not None
        if isinstance(kprobe, AggregatorProbe) and kprobe.is_optimized:
            assert kprobe.detour is not None
            return self._leave_for(kprobe, kprobe.detour.copied)
        if insn.slot is None:
            return self._emulation(kprobe)
        return self._leave_for(kprobe, insn.slot) if insn.boosted else self._step(kprobe, insn.slot)

    def _leave_for(self, kprobe: Kprobe, target: int) -> Resume:
        """Run copies that jump back by themselves: the hit is over here, post_handlers don't run."""
        ctlblk, cost = self.ctlblk, kprobe.cost

        def leave(regs: Regs, reentered: bool) -> None:
            regs.ip = target
            if not reentered:
                ctlblk.running = None
                cost.stop()

        return leave

    def _step(self, kprobe: Kprobe, slot: int) -> Resume:
        ctlblk, trap_flag = self.ctlblk, self._trap_flag

        def step(regs: Regs, reentered: bool) -> None:
            if reentered:
                self._save_previous(kprobe)
            else:
                ctlblk.status = HitStatus.SINGLE_STEP
            regs.ip = slot
            if trap_flag:
                regs.flags |= trap_flag

        return step

    def _emulation(self, kprobe: Kprobe) -> Resume:
        """Execute the instruction on the spot."""
        assert kprobe.insn is not None
        emulation = kprobe.insn.prepared.emulate
        assert emulation is not None, "an instruction without a slot is emulated"

        def emulate(regs: Regs, reentered: bool) -> None:
            if reentered:
                self._save_previous(kprobe)
            try:
                self._arch.emulate(emulation, regs, self.memory)
            except MemoryFault as fault:
                # What the emulated instruction would have met: its own page fault, at its own place.
                regs.ip = kprobe.address
                self.forget_step()
                self._machine.raise_fault(fault)
                return
            self._post_process(kprobe, regs)

        return emulate

    def _save_previous(self, kprobe: Kprobe) -> None:
        ctlblk = self.ctlblk
        assert ctlblk.running is not None
        ctlblk.interrupted.append((ctlblk.running, ctlblk.status))
        ctlblk.running = kprobe
        ctlblk.status = HitStatus.REENTER

    def _on_step_end(self, kprobe: Kprobe) -> Callable[[Regs], None]:
        assert kprobe.insn is not None
        next_ip = kprobe.address + kprobe.insn.prepared.length

        def stepped(regs: Regs) -> None:
            regs.ip = next_ip
            # Nobody's step ends where the copy was a boosted one when the CPU came into it.
            if self.ctlblk.running is not None:
                self._post_process(kprobe, regs)

        return stepped

    def _post_process(self, kprobe: Kprobe, regs: Regs) -> None:
        """Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_post_process (v6.1)."""
        ctlblk = self.ctlblk
        if ctlblk.status is HitStatus.REENTER:
            ctlblk.running, ctlblk.status = ctlblk.interrupted.pop()
            return
        if kprobe.post_handler is not None:
            ctlblk.status = HitStatus.STEP_DONE
            self._run_post_handler(kprobe, regs)
        ctlblk.running = None
        kprobe.cost.stop()

    def _run_post_handler(self, kprobe: Kprobe, regs: Regs) -> None:
        assert kprobe.post_handler is not None
        try:
            kprobe.post_handler(kprobe, regs)
        except BaseException as error:
            self.report(kprobe, error)

    def on_break(self, regs: Regs) -> None:
        """The breakpoint that ends what a pre_handler has left open; without that, a trap like any other.

        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_int3_handler (v4.14), the part on break_handler.
        """
        kprobe = self.ctlblk.running
        if kprobe is None or not kprobe.is_left_open:
            raise HardwareError(f"a breakpoint at {regs.ip - 1:#x} that ends no handler")
        if kprobe.run_break_handler(regs):
            self._resume_for(kprobe)(regs, False)

    # By a jump

    def _on_detour(self, kprobe: AggregatorProbe) -> Callable[[Regs], None]:
        """Called in the detour buffer; what the handlers change is restored by it, except ip and sp."""
        ctlblk, cost = self.ctlblk, kprobe.cost
        frame_at = self._frames.at
        compiles = kprobe.may_compile

        def hit(regs: Regs) -> None:
            if ctlblk.running is not None:
                count_missed(kprobe)
                return
            cost.start()
            ctlblk.running = kprobe
            ctlblk.status = HitStatus.ACTIVE
            ctlblk.by_breakpoint = False
            kprobe.run_all_pre_handlers(frame_at(regs.sp))
            ctlblk.running = None
            cost.stop()
            if compiles and kprobe.is_patched and kprobe.code is None and not self.is_patching():
                kprobe.sample = self._sample(frame_at(regs.sp))
                self._compile_detour(kprobe)

        return hit

    def _compile_detour(self, kprobe: AggregatorProbe) -> None:
        """From the next hit on the jump leads to a detour with the handlers in it."""
        code, detour = self._compiler.detour(kprobe), kprobe.detour
        kprobe.code = code
        kprobe.is_python = code is None
        if code is None:
            self.install(kprobe)
        else:
            assert detour is not None
            at, length = kprobe.address, detour.length
            self.redirect(kprobe, self._arch.detour_jump(at, length, code.entry, detour.scratch))

    # By a call

    def _make_on_call(self) -> Callable[[Regs], None]:
        """In the trampoline: the saved ip is behind the site, and is where it returns to."""
        find, frame_at = self._calls.get, self._frames.at

        def call(regs: Regs) -> None:
            frame = frame_at(regs.sp)
            hit = find(frame.ip)
            if hit is not None:
                hit(frame)

        return call

    def _called(self, kprobe: Kprobe) -> Callable[[Regs], None]:
        ctlblk, cost = self.ctlblk, kprobe.cost
        # Handlers expect the address of a breakpoint's return.
        seen_ip, behind = kprobe.address + self._arch.seen_ip, self._behind(kprobe)
        pre_handler, post_handler, report = kprobe.pre_handler, kprobe.post_handler, self.report
        compiles = kprobe.may_compile and not kprobe.is_disabled

        def hit(frame: Regs) -> None:
            if ctlblk.running is not None:
                count_missed(kprobe)
                return
            cost.start()
            ctlblk.running = kprobe
            ctlblk.status = HitStatus.ACTIVE
            ctlblk.by_breakpoint = False
            frame.ip = seen_ip
            try:
                leaves = pre_handler is not None and pre_handler(kprobe, frame)
            except BaseException as error:
                leaves = False
                report(kprobe, error)
            if not leaves:
                frame.ip = behind
                if post_handler is not None:
                    ctlblk.status = HitStatus.STEP_DONE
                    self._run_post_handler(kprobe, frame)
                    frame.ip = behind
            ctlblk.running = None
            cost.stop()
            if compiles and kprobe.code is None and behind not in self._traced and not self.is_patching():
                kprobe.sample = self._sample(frame)
                self._compile_call(kprobe)

        return hit

    def _compile_call(self, kprobe: Kprobe) -> None:
        """From the next hit on the site calls the handlers themselves."""
        code = kprobe.code = self._compiler.call(kprobe, self.return_at)
        kprobe.is_python = code is None
        if code is None:
            self.install(kprobe)
        else:
            self.redirect_call(kprobe, code.entry)

    # Faults and traps of the step

    def fix_fault(self, trap: Trap, regs: Regs) -> bool:
        """An exception while stepping: the end of a step by trap flag, or a fault that the original
        instruction has to have caused.

        True: that, or the probe's fault_handler has dealt with it; the guest goes on where `regs` stands.
        False: the guest gets the fault, at the address where `regs` stands now.
        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_debug_handler (v5.11), kprobe_fault_handler (v6.1).
        """
        target = self._compiler.fixups.get(trap.address)
        if target is not None and trap.vector != Vector.DEBUG:
            regs.ip = target
            return True
        running = self.ctlblk.running
        if running is None or running.insn is None or running.insn.slot is None:
            return False
        if self._trap_flag and trap.vector == Vector.DEBUG:
            return self._single_stepped(running, regs)
        if regs.ip != running.insn.slot:
            return False
        if running.run_fault_handler(regs, trap.vector):
            return True
        regs.ip = running.address
        regs.flags &= ~self._trap_flag
        self.forget_step()
        return False

    def _single_stepped(self, running: Kprobe, regs: Regs) -> bool:
        insn = running.insn
        assert insn is not None
        if regs.ip == insn.slot:
            # A repeated string instruction traps after each round.
            return True
        if regs.ip != insn.step_end:
            return False
        regs.flags &= ~self._trap_flag
        regs.ip = running.address + insn.prepared.length
        self._post_process(running, regs)
        return True

    def abandon(self) -> None:
        """The run that hits may stand in the middle of has been given up: none of them goes on."""
        self.ctlblk.interrupted.clear()
        self.ctlblk.running = None

    def forget_step(self) -> None:
        """Leave the current hit without its step's end: it faulted, or its task was killed."""
        ctlblk = self.ctlblk
        if ctlblk.status is HitStatus.REENTER:
            ctlblk.running, ctlblk.status = ctlblk.interrupted.pop()
        else:
            ctlblk.running = None


def _pass(_regs: Regs) -> None:
    """A detour whose probe is disabled."""


def count_missed(kprobe: Kprobe) -> None:
    """Mirrors: kernel/kprobes.c:kprobes_inc_nmissed_count (v6.1)."""
    if isinstance(kprobe, AggregatorProbe):
        for member in kprobe.members:
            member.nmissed += 1
    else:
        kprobe.nmissed += 1
