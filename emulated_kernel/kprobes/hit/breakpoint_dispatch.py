"""BreakpointDispatch: leads the traps of a hit to HitHandling, and compiles handlers at the first hit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.codegen.guest_code import OutOfLine
from emulated_kernel.kprobes.hit.ftrace import FtraceSites
from emulated_kernel.kprobes.hit.handling import HitHandling
from emulated_kernel.kprobes.hit.partial_jumps import PartialJumpDetector
from emulated_kernel.kprobes.kprobe import Regs
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker


class BreakpointDispatch:
    """Sets the route of each trap of a probe: the function in the machine's table that handles the trap.

    Of many probes, only few are ever hit. A probe's handlers are therefore compiled at the first hit after
    they have changed.
    """

    def __init__(
        self,
        machine: ProbedMachine,
        arch: Arch,
        table: ProbeTable,
        hits: HitHandling,
        compiler: Compiler,
        poker: TextPoker,
        split_jumps: PartialJumpDetector,
        sites: FtraceSites | None,
    ) -> None:
        self.breakpoints = machine.breakpoints
        self._debug_traps = machine.debug_traps
        self.hits = hits
        self._arch = arch
        self._table = table
        self._compiler = compiler
        self._poker = poker
        self._split_jumps = split_jumps
        self._sites = sites
        self._breakpoint_size = len(machine.model.filler)
        self._in_clock_loop = machine.in_clock_loop
        self._clock = machine.clock
        self.may_lead_jumps = True
        """Whether a hit by a jump may compile the handlers, and redirect the jump to them.

        While it is False, Python handles the hits by jumps that are not redirected yet. See
        Optimizer.stop_changes().
        """
        # Bound once, because thousands of probes keep them.
        self._on_first_breakpoint = self._first_by_breakpoint
        self._on_step_end = hits.on_step_end
        self._on_debug_trap = hits.on_debug_trap

    def update(self, head: AggrKprobe) -> None:
        """Update the routes of the probe's traps after a change of the probe, if it was ever armed."""
        if head.insn is None or head.address in self.breakpoints:
            self.install(head)

    def install(self, head: AggrKprobe) -> None:
        """Set the routes of all traps of the probe as its current state requires.

        Routes take memory, and many events are never enabled. A probe therefore has no routes before it is
        first armed.
        """
        insn = head.insn
        if insn is None:
            if self._sites is not None:
                self._sites.install(head)
            return
        breakpoints = self.breakpoints
        address = head.address
        leads_to = self._leads_to(head)
        head.continues_at = None if head.has_post_handler and not head.is_optimized else leads_to
        if head.stub is not None and head.stub.target != leads_to:
            self._drop_stub(head)
        in_clock_loop = self._in_clock_loop(address)
        if in_clock_loop:
            breakpoints[address] = self._clock.holding(self.hits.by_breakpoint(head))
        elif head.stub is None:
            breakpoints[address] = partial(self._on_first_breakpoint, head)
        else:
            breakpoints[address] = self.hits.by_stub(head, head.stub)
        self._install_step_end(head, insn)
        if head.detour is None:
            return
        detour = head.detour
        if head.is_disabled:
            # Linux: a probe that is disabled, but not unoptimized yet, ignores hits.
            self.pass_detour(detour.trap)
        elif in_clock_loop:
            breakpoints[detour.trap] = self._clock.holding(self.hits.by_detour(head))
        else:
            breakpoints[detour.trap] = partial(self._first_by_detour, head, detour.trap)

    def _install_step_end(self, head: AggrKprobe, insn: OutOfLine) -> None:
        """Route the trap that ends the step of a copied instruction, if it has such a trap."""
        step_end = insn.step_end
        if step_end is None:
            return
        hits = self.hits
        hits.steps.add(head, insn)
        next_ip = head.address + insn.prepared.length
        target = hits.after_step(head, next_ip)
        on_end = self._on_debug_trap if insn.lead else self._on_step_end
        ended: Callable[[Regs], object]
        if self._in_clock_loop(head.address):
            ended = self._clock.holding(partial(on_end, head, next_ip))
        elif target is None:
            ended = partial(on_end, head, next_ip)
        else:
            ended = Redirect(target, on_end, head, next_ip)
        if insn.lead:
            self._debug_traps[step_end] = ended
            # A repeated string instruction traps after each round.
            start = step_end - insn.prepared.length
            self._debug_traps[start] = Redirect(start, _pass)
        else:
            self.breakpoints[step_end] = ended

    def _leads_to(self, head: AggrKprobe) -> int | None:
        """Return the address at which the guest continues after the handlers of a breakpoint hit.

        Return None if the probe is not optimized and its instruction is emulated. Then Python, or code at the
        end of the stub, does the work of the instruction.
        """
        if head.is_optimized:
            assert head.detour is not None
            return head.detour.copied
        insn = head.insn
        assert insn is not None
        return insn.entry

    # The first hit after a change of the handlers

    def _first_by_breakpoint(self, head: AggrKprobe, regs: Regs) -> None:
        hits = self.hits
        breakpoints = self.breakpoints
        address = head.address
        may_compile = not head.is_disabled and head.may_compile
        route = hits.by_breakpoint(head)
        if may_compile and not self._compiler.may_make(head.nr_handlers):
            route(regs)
            return
        breakpoints[address] = route
        if not may_compile:
            self._leave_to_python(head)
            route(regs)
            return
        leads_to = self._leads_to(head)
        self._compiler.keep_sample(head, regs)
        route(regs)
        # If a handler has changed or removed the probe, the breakpoint has another route now.
        if breakpoints.get(address) is route:
            self._make_stub(head, leads_to)

    def _leave_to_python(self, head: AggrKprobe) -> None:
        """Let Python handle the probe's hits until the probe's handlers change.

        The steps of the copied instruction still end without Python if possible.
        """
        if head.is_disabled:
            return
        head.is_python = True
        if not head.has_post_handler:
            assert head.insn is not None
            self._install_step_end(head, head.insn)

    def compile_stub(self, head: AggrKprobe) -> bool:
        """Compile the handlers for breakpoint hits before the first hit; return True if there is guest code.

        Afterwards, benchmarks cannot measure the cost of a hit. They need the registers in `head.sample`,
        which only a hit that compiles the handlers stores.
        """
        if head.stub is None and not head.is_disabled and head.may_compile:
            self._make_stub(head, self._leads_to(head))
        return head.stub is not None

    def _make_stub(self, head: AggrKprobe, leads_to: int | None) -> None:
        """Compile the handlers into a stub, and make breakpoint hits enter the stub.

        `leads_to`: address at which the guest continues after the stub. If it is None, the instruction is
        emulated: if possible by its relocated form at the end of the stub, otherwise by Python.
        If the handlers cannot be compiled, Python continues to handle the hits.
        """
        hits = self.hits
        insn = head.insn
        assert insn is not None
        region = None
        if leads_to is None and not head.has_post_assembly:
            prepared = insn.prepared
            region = self._arch.emulated_region(prepared.slot_bytes[: prepared.length], head.address)
        stub = self._compiler.stub(head, leads_to, region)
        head.stub = stub
        head.is_python = stub is None
        if stub is None:
            return
        if head.has_post_assembly:
            hits.compile_post_code(head, head.address + insn.prepared.length)
        self._install_step_end(head, insn)
        self.breakpoints[head.address] = hits.by_stub(head, stub)
        if leads_to is None and stub.tail:
            emulate = partial(hits.emulate, head) if stub.region is None else hits.emulate_apart
            self.breakpoints[stub.tail] = partial(emulate, insn)

    def _first_by_detour(self, head: AggrKprobe, trap: int, regs: Regs) -> None:
        if not head.may_compile:
            route = self.hits.by_detour(head)
            self.breakpoints[trap] = route
            route(regs)
            return
        first_hit_route = self.breakpoints[trap]
        if (
            self.hits.by_detour(head)(regs)
            and self.breakpoints.get(trap) is first_hit_route
            and head.is_patched
            and head.compiled is None
            and self.may_lead_jumps
            and self._split_jumps.may_patch()
            and self._compiler.may_make(head.nr_handlers)
        ):
            self._compiler.keep_sample(head, self.hits.frames[regs.sp])
            self.compile_detour(head)

    def next_hit_compiles(self, head: AggrKprobe) -> bool:
        """Return True if Python handles the next hit of the probe, and then compiles its handlers."""
        return head.may_compile and (self.may_lead_jumps or not head.is_patched)

    def compile_detour(self, head: AggrKprobe) -> None:
        """Compile a detour that contains the handlers, and redirect the probe's jump to it.

        If the handlers cannot be compiled, Python continues to handle the hits.
        """
        code = self._compiler.detour(head)
        detour = head.detour
        head.compiled = code
        head.is_python = code is None
        if code is not None:
            assert detour is not None
            self._poker.replace(head.address, self._arch.detour_jump(detour.region, code.entry))

    def drop_code(self, head: AggrKprobe) -> None:
        """Drop the compiled handlers of a probe, because its handlers have changed.

        Python handles hits until the next compilation.
        """
        if self._compiler.asm_thunks and self._compiler.drop_asm_thunks(head) and head.insn is not None:
            # The trap at the end of a step led to a dropped handler.
            self._install_step_end(head, head.insn)
        if head.is_ftrace and self._sites is not None:
            self._sites.drop_code(head)
            return
        head.cost.forget()
        head.is_python = False
        self._drop_stub(head)
        self.drop_detour_code(head)

    def drop_detour_code(self, head: AggrKprobe) -> None:
        """Drop the compiled handlers to which the probe's jump leads.

        Until the next compilation, Python handles the hits that come by the jump.
        """
        code = head.compiled
        if code is None:
            return
        head.compiled = None
        head.cost.forget()
        if head.is_patched:
            assert head.detour is not None
            if not self._poker.is_patching(head.address):
                self._split_jumps.start_again((head.address,))
                self._poker.replace(head.address, head.detour.jump)
        self._compiler.retire(code)

    def _drop_stub(self, head: AggrKprobe) -> None:
        stub = head.stub
        if stub is None:
            return
        head.stub = None
        route = self.breakpoints.get(head.address)
        if isinstance(route, Redirect) and route.target == stub.entry:
            self.breakpoints[head.address] = route.func
        self._compiler.retire(stub)

    # Removal

    def remove(self, head: AggrKprobe) -> None:
        """Drop the probe's compiled handlers, and the route of the breakpoint at the probed address.

        The route stays if another AggrKprobe has this address now. For the breakpoint in a detour, see
        remove_detour().
        """
        self.drop_code(head)
        if self._table.get(head.address) in (head, None):
            self.breakpoints.pop(head.address, None)

    def remove_step_end(self, insn: OutOfLine) -> None:
        """Drop the routes of the traps that end a step of the copied instruction `insn`.

        This must happen before the slot of the copy is freed.
        """
        if insn.step_end is not None:
            self.hits.steps.remove(insn)
            for ends in (self._debug_traps, self.breakpoints):
                ends.pop(insn.step_end, None)
            self._debug_traps.pop(insn.step_end - insn.prepared.length, None)

    def pass_detour(self, trap: int) -> None:
        """Route a detour's breakpoint to a function that does nothing, so that the CPU continues after it.

        `trap`: address of the breakpoint. Its hits are ignored because the probe is disabled, or because the
        detour is no longer in use, though a CPU may still be in it.
        """
        self.breakpoints[trap] = Redirect(trap + self._breakpoint_size, _pass)

    def remove_detour(self, trap: int) -> None:
        """Stop handling a detour's breakpoint, which is at address `trap`, before the detour is freed."""
        self.breakpoints.pop(trap, None)


def _pass(_regs: Regs) -> None:
    """Do nothing at a trap, so that the CPU continues at the address of the trap's Redirect.

    The trap is the breakpoint in a detour that is disabled or no longer in use, or the debug trap after one
    round of a repeated string instruction.
    """
