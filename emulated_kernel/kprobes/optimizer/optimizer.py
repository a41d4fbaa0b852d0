"""Optimizer: replaces breakpoints by jumps, and jumps by breakpoints, when no CPU is in the replaced text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.kprobes.codegen.guest_code import DetourBuffer
from emulated_kernel.kprobes.hit.breakpoint_dispatch import BreakpointDispatch
from emulated_kernel.kprobes.hit.insn_copy import Breakpoints, InsnCopier
from emulated_kernel.kprobes.kprobe import Kprobe, KprobeFlag
from emulated_kernel.kprobes.optimizer.patch_stages import PatchStages
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.kprobes.quiescence import DelayedWork, GracePeriod, Span
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.text.text_poke import PokeStep, TextPoker
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field

OPTIMIZE_DELAY = 5
"""Number of jiffies from a request to the optimizer's run; the delay lets one run serve several requests.

Mirrors: kernel/kprobes.c:OPTIMIZE_DELAY (v6.1).
"""


_STAGES = {
    (True, PokeStep.BREAKPOINT, PokeStep.TAIL): "breakpoint written; next: tail of the jump",
    (True, PokeStep.BREAKPOINT, PokeStep.FIRST_BYTE): "breakpoint written; next: jump",
    (True, PokeStep.TAIL, PokeStep.FIRST_BYTE): "tail of the jump written; next: start of the jump",
    (False, PokeStep.BREAKPOINT, PokeStep.TAIL): "breakpoint written over the jump; next: original tail",
    (False, PokeStep.BREAKPOINT, PokeStep.FIRST_BYTE): "breakpoint written over the jump; next: end",
    (False, PokeStep.TAIL, PokeStep.FIRST_BYTE): "original tail written; next: end",
}
"""(is being optimized, last finished step, next step) -> text about a change of a jump that has stopped.

The first item is True if the jump is being written, and False if it is being removed. A jump that is as long
as the breakpoint has no tail.
"""

Queue = dict[AggrKprobe, None]
"""One of the optimizer's lists of probes, as in Linux.

The list is an ordered set, because it may have thousands of probes, and looking one up must be fast.
"""


@dataclass(eq=False)
class Optimizer:
    """Jump optimization of aggregator probes.

    Three lists hold the requests, and the delayed work `work` executes them.
    Mirrors: kernel/kprobes.c (v6.1), the part under CONFIG_OPTPROBES.
    """

    queued: ClassVar[str] = "waits for the optimizer"
    """Reason shown for a probe whose jump isn't written yet."""

    _table: ProbeTable
    _verdict: ProbeChecker[Any]
    _arch: Arch
    _text: Text
    _poker: TextPoker
    _routes: BreakpointDispatch
    _breakpoints: Breakpoints
    _copies: InsnCopier
    _garbage: DeferredFree
    _scheduler: GracePeriod
    _profile: Profile
    allowed: bool = field(default=True, init=False)
    """Value of sysctl debug.kprobes-optimization: whether probes may be optimized."""
    optimizing: Queue = field(default_factory=dict, init=False)
    """Probes that wait for their jumps. Mirrors: kernel/kprobes.c:optimizing_list (v6.1)."""
    unoptimizing: Queue = field(default_factory=dict, init=False)
    """Probes whose jumps wait to be removed. Mirrors: kernel/kprobes.c:unoptimizing_list (v6.1)."""
    freeing: Queue = field(default_factory=dict, init=False)
    """Probes whose jumps have been removed; the next run frees those that are unused.

    Mirrors: kernel/kprobes.c:freeing_list (v6.1).
    """

    has_found_users: bool = field(default=False, init=False)
    """Whether the latest run found a CPU or a task in the code that it was to change or free."""

    def __post_init__(self) -> None:
        self.work = DelayedWork(self._run, self._scheduler)
        self.stages = PatchStages(self._poker, self._scheduler, self._finish_stages_of)
        """Changes of jumps that have stopped after a step of patching; users can switch the stops on."""

    # Detours

    def prepare(self, head: AggrKprobe) -> None:
        """Create the detour of a probe, or set its `rejection` to the reason why it cannot have a detour.

        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_prepare_optimized_kprobe (v6.1).
        """
        addr = head.address
        head.rejection = ""
        region = self._verdict.optimized_region(addr)
        if isinstance(region, Rejection):
            head.rejection = region
            return
        if self._text.is_foreign(addr, region.length):
            self._reject(head, addr, "another debugger has patched the bytes to be replaced")
            return
        try:
            buffer = self._text.alloc_text(self._arch.max_detour, self._arch.detour_starts(region))
        except HardwareError:
            self._reject(head, addr, f"no executable memory left for a detour buffer{_where(region)}")
            return
        try:
            detour = self._arch.detour(region, buffer)
            jump = self._arch.detour_jump(region, buffer)
        except KernelError as error:
            self._text.free_text(buffer)
            self._reject(head, addr, str(error.strerror))
            return
        self._text.poke(buffer, detour.code)
        head.has_used_detour = False
        head.detour = DetourBuffer(
            address=GuestAddr(buffer),
            region=region,
            trap=buffer + detour.trap,
            copied=buffer + detour.copied,
            size=len(detour.code),
            jump=jump,
        )

    def _reject(self, head: AggrKprobe, addr: int, text: str) -> None:
        head.rejection = f"{self._verdict.place_text(addr)}: {text}"

    def _discard(self, head: AggrKprobe) -> None:
        """Free the probe's detour once no CPU is in it.

        Linux: only the worker frees detours, after a grace period. Deviates: if the probe was unoptimized
        earlier, the detour is freed together with the probe.
        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_remove_optimized_kprobe (v6.1).
        """
        detour = head.detour
        head.detour = None
        if detour is None:
            return
        if not head.has_used_detour:
            self._free_detour(detour)
            return
        self._routes.pass_detour(detour.trap)
        self._garbage.add((detour.address, detour.address + detour.size), partial(self._free_detour, detour))

    def _free_detour(self, detour: DetourBuffer) -> None:
        self._routes.remove_detour(detour.trap)
        self._text.free_text(detour.address)

    def kill(self, head: AggrKprobe) -> None:
        """Cancel a probe's requests and discard its detour, because its text is about to be freed.

        The text is not changed.

        Mirrors: kernel/kprobes.c:kill_optimized_kprobe (v6.1).
        """
        was_queued = self.is_queued(head)
        for queue in (self.optimizing, self.unoptimizing, self.freeing):
            queue.pop(head, None)
        self.stages.forget(head)
        head.flags &= ~KprobeFlag.OPTIMIZED
        head.is_patched = False
        self._discard(head)
        if was_queued and head.is_unused:
            # A queued probe without members was only waiting for its text.
            self._table.remove(head)

    def leave_text(self, spans: Sequence[Span]) -> None:
        """Set KprobeFlag.GONE for probes in `freeing` whose text is about to be freed.

        The optimizer then leaves their text unchanged. `spans`: the address ranges of this text.
        """
        for head in self.freeing:
            if any(start <= head.address < end for start, end in spans):
                head.flags |= KprobeFlag.GONE

    def free(self, head: AggrKprobe) -> None:
        """Free all resources of an AggrKprobe that has no registered probes left.

        Mirrors: kernel/kprobes.c:free_aggr_kprobe (v6.1).
        """
        self._discard(head)
        self._copies.release(head)

    # Queries

    def wants(self, kprobe: Kprobe) -> bool:  # noqa: ARG002 - djprobe's answer depends on it
        """Return True, because each probe is to get a detour if its address allows one."""
        return True

    def ask(self, kprobe: Kprobe) -> str:  # noqa: ARG002 - a djprobe gets its length
        """Return "" and do nothing, because only the jump of a djprobe must be requested.

        Djprobes overrides this method. There, the result is the reason why the probe gets no jump, or an
        empty string. Raises: KernelError (no jump is possible).
        """
        return ""

    def is_queued(self, head: AggrKprobe) -> bool:
        """Return True if the probe is in one of the optimizer's lists.

        Mirrors: kernel/kprobes.c:kprobe_queued (v6.1).
        """
        return any(head in ops for ops in (self.optimizing, self.unoptimizing, self.freeing))

    def stage_text(self, head: AggrKprobe) -> str:
        """Return a text with the last and the next step of a change that writes or removes a probe's jump.

        The change has stopped between these two steps; see PatchStages.

        Raises: KeyError (no change of the probe's jump has stopped).
        """
        stages = self.stages
        return _STAGES[head in self.optimizing, stages.step(head), stages.next_step(head)]

    def is_disarmed(self, head: AggrKprobe) -> bool:
        """Return True if the probe is disabled and not queued.

        Mirrors: kernel/kprobes.c:kprobe_disarmed (v6.1).
        """
        return head.is_disabled and not self.is_queued(head)

    def covering(self, addr: int) -> Iterator[AggrKprobe]:
        """Iterate over the optimizable probes before `addr` whose jumps would cover `addr`.

        Linux: only the nearest probe before `addr` is checked. If that probe is disabled, a breakpoint can
        overwrite the jump of an earlier probe. Deviates: all probes are found.
        Mirrors: kernel/kprobes.c:get_optimized_kprobe (v6.1).
        """
        for distance in range(1, self._arch.max_detoured):
            found = self._table.get(addr - distance)
            if found is not None and found.detour is not None and distance < found.detour.length:
                yield found

    def blocked_by(self, head: AggrKprobe) -> AggrKprobe | None:
        """Return an armed probe whose address the jump of `head` would cover, or None if there is none.

        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_check_optimized_kprobe (v6.1).
        """
        assert head.detour is not None
        for distance in range(1, head.detour.length):
            other = self._table.get(head.address + distance)
            if other is not None and not self.is_disarmed(other):
                return other
        return None

    # Requests

    def optimize(self, head: AggrKprobe) -> None:
        """Queue a probe for optimization, if it may be optimized.

        Mirrors: kernel/kprobes.c:optimize_kprobe (v6.1).
        """
        if head.detour is None or head.is_held:
            return
        if not self.allowed or head.is_disabled or self._table.all_disarmed:
            return
        if head.needs_breakpoint or self.blocked_by(head) is not None:
            return
        if head.is_optimized:
            if head in self.unoptimizing:
                del self.unoptimizing[head]
                if head in self.stages:
                    self._reverse(head, optimizing=True)
            return
        self._mark(head, optimized=True)
        self.optimizing[head] = None
        self._kick()

    def unoptimize(self, head: AggrKprobe, *, force: bool) -> None:
        """Remove the probe's jump: at once with `force`, otherwise in the optimizer's next run.

        Mirrors: kernel/kprobes.c:unoptimize_kprobe (v6.1).
        """
        if self.is_disarmed(head) or not head.is_optimized:
            return
        if head in self.optimizing:
            del self.optimizing[head]
            if head not in self.stages:
                self._mark(head, optimized=False)
            elif force:
                self._expose_breakpoint(head)
            else:
                self._reverse(head, optimizing=False)
        elif head in self.unoptimizing:
            if force:
                self._expose_breakpoint(head)
                del self.unoptimizing[head]
                self.freeing[head] = None
                self._kick()
        elif force:
            self._expose_breakpoint(head)
        else:
            self.unoptimizing[head] = None
            self._kick()

    def allow(self, allowed: bool) -> None:
        """Allow the optimization of probes, or forbid it and remove all jumps before returning.

        Mirrors: kernel/kprobes.c:optimize_all_kprobes, unoptimize_all_kprobes (v6.1).
        """
        if allowed == self.allowed:
            return
        self.allowed = allowed
        for head in list(self._table):
            if head.is_disabled:
                continue
            if allowed:
                self.optimize(head)
            else:
                self.unoptimize(head, force=False)
        if not allowed:
            self.flush()

    def hold(self, head: AggrKprobe, held: bool) -> None:
        """Keep one probe unoptimized if `held` is set; otherwise allow its optimization again.

        The queue of the optimizer is processed before the method returns.
        """
        head.is_held = held
        if held:
            self.unoptimize(head, force=False)
        else:
            self.optimize(head)
        self.flush()

    def stop_changes(self, on: bool, delay: int | None = None) -> None:
        """Let changes of jumps stop after each step of patching if `on` is set, otherwise not at all.

        If `on` is False, complete all changes that have stopped. `delay`: number of jiffies after which a
        stopped change continues by itself; None: only PatchStages.go_on() continues it. While `on` is set, no
        jump leads to a compiled detour, because the first hit would redirect the jump without a stop.
        """
        if on and not self.stages.is_on:
            for head in self._table:
                if head.detour is not None:
                    self._routes.drop_detour_code(head)
        self.stages.switch(on, delay)
        self._routes.may_lead_jumps = not on

    # The worker

    def why_queued(self) -> str:
        """Return the reason why the jump of a queued probe is not written yet."""
        users = ", which waits until no CPU or task is in code that it changes or frees"
        return self.queued + (users if self.has_found_users else "")

    def flush(self) -> None:
        """Execute the queued requests now. Mirrors: kernel/kprobes.c:wait_for_kprobe_optimizer (v6.1).

        Linux: the flush also waits for quiescence. Deviates: the guest doesn't run during the flush. If a CPU
        or task may be in the text to be replaced, the requests stay queued.
        """
        if self.optimizing or self.unoptimizing:
            self.work.flush()

    def _reverse(self, head: AggrKprobe, *, optimizing: bool) -> None:
        """Reverse an optimization or unoptimization that has stopped between two steps of patching.

        The text does not change yet. `optimizing`: True if the new change is to write the jump, False if it
        is to remove the jump.
        """
        assert head.detour is not None
        if optimizing:
            self.optimizing[head] = None
            self.stages.reverse(head, head.detour.jump)
        else:
            self.unoptimizing[head] = None
            self.stages.reverse(head, self._breakpoint(head) + head.saved_tail)

    def _kick(self) -> None:
        """Let the optimizer run after the delay. Mirrors: kernel/kprobes.c:kick_kprobe_optimizer (v6.1)."""
        self.work.schedule(OPTIMIZE_DELAY)

    def _run(self) -> None:
        """Execute queued requests. Mirrors: kernel/kprobes.c:kprobe_optimizer (v6.1)."""
        self._unoptimize_all()
        self.has_found_users = not self._scheduler.is_quiescent(self._affected())
        if not self.has_found_users:
            self._optimize_all()
            self._free_all()
        # Changes that have stopped do not need this worker to continue.
        if len(self.optimizing) + len(self.unoptimizing) > len(self.stages) or self.freeing:
            self._kick()

    def _free_all(self) -> None:
        """Free the slots and detours of unoptimized probes; the caller must have checked their quiescence."""
        for head in self.freeing:
            head.has_used_detour = False
            self._discard(head)
            self._copies.release(head)
        self.freeing.clear()

    def _affected(self) -> list[Span]:
        """Return the ranges that must be quiescent before jumps are written and detours are freed.

        The ranges contain the text that jumps will cover, and the slots and detours that jump back into this
        text. They also contain the slots and detours that will be freed, and pieces that DeferredFree has not
        freed yet. These pieces may jump into all other ranges.
        """
        spans = {*self._garbage.spans}
        for head in self.optimizing:
            assert head.detour is not None
            spans.add((head.address + 1, head.detour.region.end))
            spans.update(self._leading_to(head))
        for head in self.freeing:
            spans.update(self._places_of(head))
        return [*spans]

    def _leading_to(self, head: AggrKprobe) -> Iterator[Span]:
        """Iterate over address ranges of code that can enter the middle of a probe's region without a hit.

        It is in the probe's own slot, or in slots, detours and handlers of other probes that may continue in
        the region.
        """
        assert head.detour is not None
        for distance in range(1 - self._arch.max_detoured, head.detour.length):
            other = self._table.get(head.address + distance)
            if other is head:
                yield from self._slot_of(head)
            elif other is not None:
                yield from self._places_of(other)

    def _places_of(self, probe: AggrKprobe) -> Iterator[Span]:
        """Iterate over the address ranges of a probe's slot, detour and compiled handlers."""
        yield from self._slot_of(probe)
        for code in (probe.detour, probe.stub, probe.compiled):
            if code is not None:
                yield code.address, code.address + code.size

    def _slot_of(self, probe: AggrKprobe) -> Iterator[Span]:
        insn = probe.insn
        if insn is not None and insn.slot is not None:
            yield insn.slot - insn.lead, insn.slot + self._arch.max_insn_size

    def _unoptimize_all(self) -> None:
        """Remove the jumps whose removal is queued.

        Mirrors: kernel/kprobes.c:do_unoptimize_kprobes (v6.1).
        """
        for head in [head for head in self.unoptimizing if head not in self.stages]:
            if self.stages.is_on and not self._table.all_disarmed:
                head.is_patched = False
                self.stages.begin(head, self._breakpoint(head) + head.saved_tail)
            else:
                self._expose_breakpoint(head)
                del self.unoptimizing[head]
                self.freeing[head] = None
        done = [*self.freeing]
        self.freeing.clear()
        self._clear_up(done)

    def _clear_up(self, done: Sequence[AggrKprobe]) -> None:
        """Complete the removal of jumps for the probes `done`, in whose text there is no jump any more.

        Remove the breakpoints of disabled probes, and queue unused probes to be freed.
        """
        for head in done:
            if head.is_disabled and not head.is_gone:
                self._breakpoints.clear(head)
            if not head.is_unused:
                continue
            if self._table.get(head.address) is head:
                self._table.remove(head)
                self._routes.remove(head)
            self.freeing[head] = None

    def _optimize_all(self) -> None:
        """Write the queued jumps. Mirrors: arch/x86/kernel/kprobes/opt.c:arch_optimize_kprobes (v6.1)."""
        if self._table.all_disarmed or not self.allowed:
            return
        for head in [head for head in self.optimizing if head not in self.stages]:
            assert head.detour is not None
            if not self._is_as_prepared(head, head.detour):
                self._mark(head, optimized=False)
                del self.optimizing[head]
                continue
            size = len(self._breakpoint(head))
            jump = head.detour.jump
            head.saved_tail = self._text.current(head.address + size, len(jump) - size)
            if self.stages.is_on:
                # The text stays quiescent: from here on no code leads to bytes that the jump changes.
                self.stages.begin(head, jump)
            else:
                self._poker.replace(head.address, jump)
                self._is_written(head)
                del self.optimizing[head]

    def _finish_stages_of(self, head: AggrKprobe) -> None:
        """Complete the optimization or unoptimization of `head`; called after the last step of patching."""
        if head in self.optimizing:
            del self.optimizing[head]
            self._is_written(head)
            return
        del self.unoptimizing[head]
        self._mark(head, optimized=False)
        self._clear_up((head,))
        if self.freeing:
            self._kick()

    def _is_written(self, head: AggrKprobe) -> None:
        """Set `head.is_patched`: the probe's jump is in the text now. Forget the cost of earlier hits."""
        head.is_patched = True
        head.cost.forget()

    def _is_as_prepared(self, head: AggrKprobe, detour: DetourBuffer) -> bool:
        """Return True if no other code has changed the kept bytes of the probe's jump.

        Kept bytes are the last bytes of the jump. They are equal to the original text there, which is after
        the region, and restrict the target of the jump. Set the probe's `rejection` to the reason if the
        bytes have changed, otherwise to "".
        """
        region = detour.region
        kept = detour.jump[len(detour.jump) - region.kept :]
        is_same = self._text.current(region.end, region.kept) == kept
        head.rejection = ""
        if not is_same:
            self._reject(head, region.end, "another debugger has patched the bytes")
        return is_same

    def _expose_breakpoint(self, head: AggrKprobe) -> None:
        """Replace a jump by the breakpoint. Mirrors: kernel/kprobes.c:force_unoptimize_kprobe (v6.1)."""
        breakpoint_ = self._breakpoint(head)
        poker = self._poker
        # The poker exposes its own breakpoint, the shortest one, which suffices only for shorter
        # instructions.
        is_own = breakpoint_ == self._arch.breakpoint
        write = poker.expose_breakpoint if is_own else poker.replace
        write(head.address, breakpoint_ + head.saved_tail)
        head.is_patched = False
        self.stages.forget(head)
        self._routes.drop_code(head)
        self._mark(head, optimized=False)

    def _breakpoint(self, head: AggrKprobe) -> bytes:
        assert head.insn is not None
        return self._arch.breakpoint_for(head.insn.prepared.length)

    def _mark(self, head: AggrKprobe, *, optimized: bool) -> None:
        if optimized:
            head.flags |= KprobeFlag.OPTIMIZED
            head.has_used_detour = True
        else:
            head.flags &= ~KprobeFlag.OPTIMIZED
        self._routes.update(head)


def _where(region: Region) -> str:
    """Return the end of a message that no memory is left for a detour: where the detour would have to be.

    Return "" if the jump of `region` keeps no bytes of the original text.
    """
    return " where the kept bytes let the jump lead" if region.kept else ""
