"""The state machine of a hit, from the breakpoint, detour or fentry call to the probed code.

Each row has a state or a kind of hit, and then the steps that follow. Further lines are alternatives.

    begin           KprobeCtlblk.running = the probe -> the row of the kind of hit
                    if another hit is being handled: the hit is missed, and only the probed instruction runs
    breakpoint      begin -> pre_handler -> end -> the copy -> the probed code, if no Python follows
                    begin -> pre_handler -> singlestep
      singlestep    a copy in a slot -> end of the step -> post_process
                    emulation -> post_process
      post_process  post_handler -> end
    stub            guest code -> the copy -> the probed code; KprobeCtlblk has no state of such a hit
                    guest code, with the relocated form of an emulated instruction -> the probed code
                    or begin -> guest code -> singlestep, if Python has a part in the hit
    detour          begin -> pre_handlers -> end
    fentry call     begin -> pre_handler -> post_handler -> end

The guest runs handlers in assembly before those in Python; see asm_thunks.py.

by_breakpoint(), by_detour() and by_call() return functions that handle the hits of one probe. Each of them
repeats the statements that begin and end a hit: calling functions for this would take 100 of the 900 ns of a
hit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Protocol

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.asm_handlers import HandlerPoint
from emulated_kernel.kprobes.codegen.asm_thunks import AsmThunks
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode, OutOfLine
from emulated_kernel.kprobes.codegen.pt_regs import PtRegsFrames
from emulated_kernel.kprobes.hit.ctlblk import KprobeCtlblk
from emulated_kernel.kprobes.hit.handler_failures import HandlerFailures
from emulated_kernel.kprobes.hit.partial_jumps import PartialJumpDetector
from emulated_kernel.kprobes.hit.steps import Steps
from emulated_kernel.kprobes.kprobe import Regs
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault, Trap, TrapKind
from emulated_kernel.util.abi import Vector


class CallHandler(Protocol):
    """Function that handles the hits that a probe's fentry site causes by a call; see HitHandling.by_call."""

    def __call__(self, site: int, frame: Regs, then: Callable[[], object] | None = None, /) -> bool: ...


class HitHandling:
    """Handles the hits of all CPUs; `BreakpointDispatch` and `FtraceSites` route traps to this class.

    Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_int3_handler,
    arch/x86/kernel/kprobes/opt.c:optimized_callback,
    arch/x86/kernel/kprobes/ftrace.c:kprobe_ftrace_handler (v6.1).
    Deviates: the interrupt flag isn't cleared around the step. Instead, the machine delivers interrupts only
    while may_interrupt() returns True.
    """

    def __init__(
        self, machine: ProbedMachine, arch: Arch, compiler: Compiler, split_jumps: PartialJumpDetector
    ) -> None:
        self._machine = machine
        self._compiler = compiler
        self._split_jumps = split_jumps
        self._arch = arch
        self._call_size = arch.call_size
        self._ip_offset = arch.handler_ip_offset
        """Offset in bytes from the probed address to the ip that handlers get at a hit, as in Linux."""
        self._rewinds = arch.handler_ip_offset != len(arch.breakpoint)
        self.frames = PtRegsFrames(machine.memory, arch.pt_regs, arch.word_size)
        """Stack address -> the registers that guest code has saved there, for handlers."""
        self.ctlblk = KprobeCtlblk(machine.hooks.python, compiler.current_kprobe)
        self.steps = Steps()
        """The copied instructions that CPUs may be stepping."""
        self.asm_thunks = AsmThunks(machine, compiler)
        self.failures = HandlerFailures(machine)
        machine.hooks.fault_hooks.append(self.fix_fault)
        machine.interrupt_if.append(self.may_interrupt)
        machine.in_handler.append(compiler.contains)

    def _run_asm_handler(
        self,
        head: AggrKprobe,
        point: HandlerPoint,
        on_return: Callable[[Regs], object],
        *,
        in_frame: bool = False,
    ) -> bool:
        """Let the guest run the probe's assembly handler, and then call `on_return` with the registers.

        `point`: whether it is the handler before the instruction or the one after it. `in_frame`: whether the
        probed code's registers are in a struct pt_regs at sp, as in a hit by a call or a jump. Return True if
        the guest will run the handler. If there is no room for the handler's code, count a missed hit and
        return False; `on_return` is not called.
        """
        machine = self._machine
        ctlblk = self.ctlblk

        def go_on(live: Regs) -> None:
            ctlblk.leave_python()
            on_return(live)

        then = machine.clock.holding(go_on) if machine.in_clock_loop(head.address) else go_on
        if not self.asm_thunks.run_asm_handlers(
            (head,), point, machine.regs, in_frame=in_frame, on_return=then
        ):
            return False
        ctlblk.enter_python()
        return True

    # By a breakpoint

    def by_breakpoint(self, head: AggrKprobe) -> Callable[[Regs], None]:
        """Return the Python function that handles the probe's hits by a breakpoint.

        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_int3_handler (v6.1).
        """
        ctlblk = self.ctlblk
        keep_cost = head.cost.kept().append
        handler_ip = head.address + self._ip_offset
        rewinds = self._rewinds

        def hit(regs: Regs, started: int = 0) -> None:
            if not started:
                if ctlblk.running is not None:
                    head.miss()
                    self.singlestep(head, regs, reentered=True)
                    return
                started = perf_counter_ns()
                ctlblk.running = head
                ctlblk.by_breakpoint = True
                if head.has_assembly and self._run_asm_handler(
                    head, HandlerPoint.PRE, partial(hit, started=started)
                ):
                    return
            if rewinds:
                regs.ip = handler_ip
            pre_handler, owner = head.pre_call or head.collect()
            try:
                leaves = pre_handler(owner, regs)
            except BaseException as error:
                head.report(owner, error)
                leaves = None
            if not leaves:
                behind = head.continues_at
                if behind is None:
                    ctlblk.started = started
                    self.singlestep(head, regs, reentered=False)
                    return
                regs.ip = behind
                keep_cost(perf_counter_ns() - started)
            elif owner is head and head.is_left_open:
                ctlblk.started = started
                ctlblk.enter_python()
                return
            ctlblk.running = None
            ctlblk.by_breakpoint = False

        return hit

    def singlestep(self, head: AggrKprobe, regs: Regs, *, reentered: bool) -> None:
        """Run the probed instruction: its copy in the slot or in the detour, or an emulation.

        `reentered`: whether the hit occurred within another hit, and so is a missed hit.
        Mirrors: arch/x86/kernel/kprobes/core.c:setup_singlestep, reenter_kprobe (v6.1).
        """
        ctlblk = self.ctlblk
        insn = head.insn
        assert insn is not None
        copy: int | None = insn.slot if insn.boosted else None
        if head.is_optimized:
            assert head.detour is not None
            copy = head.detour.copied
        if copy is not None:
            # The copy jumps back by itself. The hit ends here, and post_handlers don't run.
            regs.ip = copy
            if not reentered:
                ctlblk.reset_current(head)
            return
        if reentered:
            ctlblk.save_previous(head)
        if insn.slot is not None:
            ctlblk.enter_python()
            regs.ip = insn.slot
            if insn.lead:
                regs.step(True)
            return
        self.emulate(head, insn, regs)

    def emulate(self, head: AggrKprobe, insn: OutOfLine, regs: Regs) -> None:
        """Emulate the probed instruction, and end the hit.

        The caller passes `insn`, because `head.insn` is None if the probe was unregistered during the hit.
        """
        ctlblk = self.ctlblk
        emulation = insn.prepared.emulate
        assert emulation is not None, "an instruction without a slot is emulated"
        try:
            emulation.run(regs, self._machine.memory)
        except MemoryFault as fault:
            # Raise the page fault that the emulated instruction would have caused, at the probed address.
            regs.ip = head.address
            ctlblk.forget_current()
            self._machine.raise_fault(fault)
            return
        self._post_process(head, regs)

    def emulate_apart(self, insn: OutOfLine, regs: Regs) -> None:
        """Emulate the probed instruction at a hit that guest code has handled in all other respects.

        KprobeCtlblk has no state of such a hit. The guest has already read the memory that the instruction
        reads. So the emulation does not fault.
        """
        emulation = insn.prepared.emulate
        assert emulation is not None
        emulation.run(regs, self._machine.memory)

    def on_step_end(self, head: AggrKprobe, next_ip: int, regs: Regs) -> None:
        """End a step in the slot: continue the guest after the probed instruction, whose end is `next_ip`."""
        regs.ip = next_ip
        if self.ctlblk.running is not None:
            self._post_process(head, regs)
        elif head.has_post_assembly:
            # The handlers before the instruction were guest code, or the copy was boosted.
            code = self.compile_post_code(head, next_ip)
            if code is not None:
                regs.ip = code.entry

    def on_debug_trap(self, head: AggrKprobe, next_ip: int, regs: Regs) -> None:
        """End a step at the single-step trap. `next_ip`: address after the probed instruction.

        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_debug_handler (v5.11).
        """
        regs.step(False)
        self.on_step_end(head, next_ip, regs)

    def _post_process(self, head: AggrKprobe, regs: Regs) -> None:
        """Call the probe's post_handlers, except at a missed hit, and end the hit.

        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_post_process (v6.1).
        """
        ctlblk = self.ctlblk
        if ctlblk.interrupted:
            ctlblk.restore_previous()
            return
        if head.has_post_assembly and self._run_post_assembly(head, regs):
            return
        self._call_post_handler(head, regs)

    def _run_post_assembly(self, head: AggrKprobe, regs: Regs) -> bool:
        """Make the guest run the probe's post_code, and return True.

        Return False if there is no room for the machine code of the post_code.
        """
        if not self._continues_without_python(head):
            return self._run_asm_handler(head, HandlerPoint.POST, partial(self._call_post_handler, head))
        code = self.compile_post_code(head, regs.ip)
        if code is None:
            return False
        self.ctlblk.reset_current(head)
        regs.ip = code.entry
        return True

    def _continues_without_python(self, head: AggrKprobe) -> bool:
        """Return True if no Python is needed between the probe's post_code and the next instruction."""
        insn = head.insn
        return insn is not None and insn.slot is not None and not head.has_python_post_handler

    def compile_post_code(self, head: AggrKprobe, next_ip: int) -> CompiledCode | None:
        """Return guest code that runs the probe's post_code and then jumps to `next_ip`.

        Return None if Python is needed between the post_code and `next_ip`. If there is no room for the code,
        count a missed hit and return None.
        """
        if not self._continues_without_python(head):
            return None
        code = self._compiler.post_code(head, partial(head.emit_assembly, point=HandlerPoint.POST), next_ip)
        if code is None:
            head.miss_assembly(HandlerPoint.POST)
        return code

    def after_step(self, head: AggrKprobe, next_ip: int) -> int | None:
        """Return the address at which the guest continues after the step of a hit, without Python.

        Return None if Python must end the step: a post_handler follows, the post_code is not compiled yet,
        or the probe has no compiled handler yet. `next_ip`: address after the probed instruction.
        """
        if head.stub is None:
            return next_ip if head.is_python and not head.has_post_handler else None
        # With a stub, no enabled probe has a post_handler in Python.
        if not head.has_post_assembly:
            return next_ip
        code = self._compiler.existing_post_code(head, next_ip)
        return None if code is None else code.entry

    def _call_post_handler(self, head: AggrKprobe, regs: Regs) -> None:
        if head.has_post_handler:
            head.run_post_handlers(regs)
        self.ctlblk.reset_current(head)

    def on_break(self, regs: Regs) -> None:
        """Call the break_handler of the probe whose pre_handler has returned a true value.

        The probe's hit has not ended yet. If the break_handler returns a true value, the probed instruction
        runs. Otherwise the guest continues at `regs.ip`.
        Raises: HardwareError (there is no such probe).
        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_int3_handler (v4.14), the part on break_handler.
        """
        head = self.ctlblk.running
        if head is None or not head.is_left_open:
            at = regs.ip - len(self._machine.model.filler)
            raise HardwareError(f"a breakpoint at {at:#x} that ends no handler")
        if head.run_break_handler(regs):
            self.singlestep(head, regs, reentered=False)

    def by_stub(self, head: AggrKprobe, stub: CompiledCode) -> Callable[[Regs], object]:
        """Return the handler of breakpoint hits for a probe whose handlers are compiled into a stub.

        If no part of a hit needs Python, the handler is a Redirect to the stub. Otherwise it is a Python
        function that enters the stub. For speed, this function is a closure over values that are known
        before the hit.
        """
        ctlblk = self.ctlblk
        by_python = self.by_breakpoint(head)
        entry = stub.entry
        ends_in_python = self.ends_in_python(head, stub)

        def hit(regs: Regs) -> None:
            if head.stub is not stub or ctlblk.running is not None:
                # The text is being patched and the stub has already been dropped, or the hit is missed.
                by_python(regs)
                return
            if ends_in_python:
                ctlblk.started = perf_counter_ns()
                ctlblk.set_running(head, by_breakpoint=True)
            regs.ip = entry

        return hit if ends_in_python else Redirect(entry, hit)

    def ends_in_python(self, head: AggrKprobe, stub: CompiledCode) -> bool:
        """Return True if, at hits that enter `stub`, Python emulates the instruction or ends its step."""
        insn = head.insn
        assert insn is not None
        if stub.target is None:
            return stub.region is None
        if not _is_stepped(head, stub):
            return False
        return self.after_step(head, head.address + insn.prepared.length) is None

    # By a jump

    def by_detour(self, head: AggrKprobe) -> Callable[[Regs], bool]:
        """Return the handler of hits by the jump to the probe's detour.

        The handler returns False for a missed hit. The detour buffer restores the registers that handlers
        change, except ip and sp. The results of the probe's handlers are ignored: the guest always continues
        in the detour.
        Mirrors: kernel/kprobes.c:opt_pre_handler (v6.1).
        """
        ctlblk = self.ctlblk
        keep_cost = head.cost.kept().append
        frames = self.frames

        def hit(regs: Regs, started: int = 0) -> bool:
            frame = frames[regs.sp]
            if not started:
                if ctlblk.running is not None:
                    head.miss()
                    return False
                started = perf_counter_ns()
                ctlblk.running = head
                if head.has_assembly and self._run_asm_handler(
                    head, HandlerPoint.PRE, partial(hit, started=started), in_frame=True
                ):
                    return True
            pre_handler, owner = head.pre_call or head.collect()
            if owner is head:
                head.run_all_pre_handlers(frame)
            else:
                try:
                    pre_handler(owner, frame)
                except BaseException as error:
                    head.report(owner, error)
            ctlblk.running = None
            keep_cost(perf_counter_ns() - started)
            return True

        return hit

    # By a call

    def by_call(self, head: AggrKprobe) -> CallHandler:
        """Return the function that handles the probe's hits when its fentry site calls ftrace's trampoline.

        This handler returns False for a missed hit. Its arguments are the site's address, the saved
        registers, and a function that calls the site's users that were attached before the probe. The
        function is None if there are no such users. The handler calls this function after the probe's
        handlers, but not if the hit is missed. The trampoline returns to the ip of the saved registers.
        """
        ctlblk = self.ctlblk
        keep_cost = head.cost.kept().append
        handler_ip = head.address + self._ip_offset
        behind = head.address + self._call_size

        def hit(site: int, frame: Regs, then: Callable[[], object] | None = None, started: int = 0) -> bool:
            if not started:
                if ctlblk.running is not None:
                    head.miss()
                    return False
                started = perf_counter_ns()
                ctlblk.running = head
                if head.has_assembly and self._run_asm_handler(
                    head,
                    HandlerPoint.PRE,
                    partial(_hit_again, hit, site, frame, then, started),
                    in_frame=True,
                ):
                    return True
            frame.ip = handler_ip
            pre_handler, owner = head.pre_call or head.collect()
            try:
                leaves = pre_handler(owner, frame)
            except BaseException as error:
                head.report(owner, error)
                leaves = None
            if not leaves:
                frame.ip = behind
                if head.has_post_handler:
                    ctlblk.started = started
                    self._end_call(head, frame, then)
                    return True
            ctlblk.running = None
            keep_cost(perf_counter_ns() - started)
            if then is not None:
                then()
            return True

        return hit

    def _end_call(self, head: AggrKprobe, frame: Regs, then: Callable[[], object] | None) -> None:
        """Run the post_handlers of a hit by a call, in assembly and in Python, and end the hit.

        `frame`: the saved registers. `then`: function that calls the site's users that were attached before
        the probe; None if there are none.
        """

        def end(_live: Regs) -> None:
            behind = frame.ip
            self._call_post_handler(head, frame)
            frame.ip = behind
            if then is not None:
                then()

        if not head.has_post_assembly or not self._run_asm_handler(
            head, HandlerPoint.POST, end, in_frame=True
        ):
            end(frame)

    # Faults and interrupts

    def fix_fault(self, trap: Trap, regs: Regs) -> bool:
        """Handle an exception in a step or in compiled code; return True if it is settled.

        True: the guest continues with the registers `regs`. False: the caller must handle the exception. If a
        memory access of compiled code faults, the guest continues at the fixup of the access.
        A fault in a step is handled by the probe's fault_handler, or reported to the guest at the probed
        address. A fault in the relocated form of an emulated instruction is always reported at the probed
        address.
        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_fault_handler (v6.1).
        """
        target = self._compiler.fixups.get(trap.address)
        if target is not None and trap.vector != Vector.DEBUG:
            regs.ip = target
            return True
        if trap.kind is TrapKind.BUDGET:
            return False
        emulated = self._compiler.relocated.get(regs.ip)
        if emulated is not None:
            regs.ip = emulated
            return False
        step = self.steps.at(regs.ip)
        if step is None or regs.ip != step.insn.slot:
            return False
        head = step.head
        if head.run_fault_handler(regs, self._machine.model.trap_number(trap)):
            return True
        regs.ip = head.address
        if step.insn.lead:
            regs.step(False)
        if self.ctlblk.running is head:
            self.ctlblk.forget_current()
        return False

    @property
    def is_underway(self) -> bool:
        """Return True if Python handles a hit on any CPU, or a CPU is in a compiled handler or in a step."""
        return self.ctlblk.is_underway or any(self._is_within(ip) for ip, _ in self._machine.positions())

    def _is_within(self, ip: int) -> bool:
        """Return True if `ip` is in guest code of a hit: in a compiled handler, or in a step."""
        return self.steps.at(ip) is not None or self._compiler.contains(ip)

    def may_interrupt(self) -> bool:
        """Return True if the machine may deliver an interrupt.

        An interrupt is forbidden between a hit and the end of the hit's step, because the CPU's registers
        belong to the hit. It is forbidden in a compiled handler, which may have written half a record. It is
        also forbidden between the two instructions of a jump or call that may be removed. In Linux, a kernel
        whose jumps or calls are two instructions isn't preemptible. So no task is in the middle of one while
        it is patched.
        """
        ip = self._machine.regs.ip
        return self.ctlblk.running is None and not self._is_within(ip) and not self._split_jumps.contains(ip)


def _hit_again(
    hit: Callable[..., bool],
    site: int,
    frame: Regs,
    then: Callable[[], object] | None,
    started: int,
    _live: Regs,
) -> None:
    """Continue a hit that a call of ftrace's trampoline began, after the guest ran the assembly handler.

    `hit`: the handler of the hit, which by_call() has made. Call it again with `site`, `frame` and `then`,
    the arguments of its first call, and with `started`, the time at which the hit started. `started` is in
    nanoseconds, as from perf_counter_ns(). `_live`: the registers after the assembly handler; not used. This
    is a module-level function, because a closure in by_call() would slow down all other hits.
    """
    hit(site, frame, then, started)


def stub_traps(head: AggrKprobe, stub: CompiledCode) -> int:
    """Return the number of traps at each hit of a probe whose handlers are compiled into `stub`."""
    is_emulated = stub.target is None and stub.region is None
    return 1 + bool(stub.leads) + (is_emulated or _is_stepped(head, stub))


def _is_stepped(head: AggrKprobe, stub: CompiledCode) -> bool:
    """Return True if `stub` leads to a copied instruction after which the CPU traps."""
    insn = head.insn
    assert insn is not None
    return stub.target is not None and stub.target == insn.entry and not insn.boosted
