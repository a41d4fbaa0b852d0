"""Kprobes: registration, enabling and arming of probes, with Linux's order of checks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from emulated_kernel.arch.analysis.probe_rules import probe_rules_named
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes import report
from emulated_kernel.kprobes.aggr_kprobe import (
    KPROBE,
    AggrKprobe,
    has_post_handler,
    is_jprobe,
    takes_flags,
)
from emulated_kernel.kprobes.arming import Arming
from emulated_kernel.kprobes.codegen.asm_handlers import (
    AssembledHandlers,
    HandlerPoint,
    PerCpuVars,
    handler_texts,
)
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.kprobes.codegen.guest_code import DetourBuffer
from emulated_kernel.kprobes.hit.breakpoint_dispatch import BreakpointDispatch
from emulated_kernel.kprobes.hit.entry_code import EntryCode
from emulated_kernel.kprobes.hit.ftrace import FtraceSites
from emulated_kernel.kprobes.hit.ftrace_ops import FtraceOps
from emulated_kernel.kprobes.hit.handling import HitHandling
from emulated_kernel.kprobes.hit.insn_copy import Breakpoints, InsnCopier
from emulated_kernel.kprobes.hit.partial_jumps import PartialJumpDetector
from emulated_kernel.kprobes.kprobe import Kprobe, KprobeFlag
from emulated_kernel.kprobes.optimizer.djprobe import Djprobes
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.probe_places import ProbePlaces
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Profile
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker
from emulated_kernel.util.abi import HZ
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple


class ProbedPlace(NamedTuple):
    """The place in probed code that corresponds to an address in generated code."""

    address: int
    """Address of the original instruction that the CPU is about to execute."""
    detour: tuple[int, range] | None = None
    """Entry address and address range of the detour or stub (compiled handler) that the CPU executes.

    The value is None if the CPU is in an insn slot, or in the copied instructions at the end of a detour or
    stub.
    """
    pushed: int = 0
    """Number of bytes that the copy of the instruction has pushed on the stack so far."""
    is_calling: bool = False
    """Whether the next instruction is the jump with which the copy of a call instruction ends."""


class Kprobes:
    """All kprobes of one kernel. Methods that change them assert that the control lock is held.

    Mirrors: kernel/kprobes.c (v6.1).
    """

    def __init__(
        self,
        machine: ProbedMachine,
        image: ProbedTables,
        arch: Arch,
        log: Callable[[str], None],
        scheduler: GracePeriod,
        lock: ControlLock,
        profile: Profile = PROFILES[DEFAULT],
    ) -> None:
        self.profile = profile
        self.lock = lock
        """The control lock. Classes for other kinds of probes use it to assert that their callers hold it."""
        self._image = image
        self.symbols = image.kallsyms
        self._log = log
        self._arch = arch
        self._bits = arch.bits
        table = ProbeTable(arch.bits)
        self.table = table
        """Table: probed address -> its probes. It also has the flag that all probes are disarmed."""
        self.after_switch: list[Callable[[], None]] = []
        """Functions that are called after all probes, or all fentry sites, were armed or disarmed."""
        self._assembler = arch.assembler
        self._records = machine.records
        self._slot_size = arch.max_insn_size
        strategy = arch.strategy(profile.strategies) if profile.optimizer else None
        rules = probe_rules_named(profile.probe_rules)
        verdict = arch.probe_checker(image, strategy, ftrace=profile.ftrace, rules=rules)
        self.probe_checker = verdict
        self.places = ProbePlaces(image.kallsyms, verdict)
        text = machine.text
        poker = TextPoker(text, arch.breakpoint, lock)
        self.poker = poker
        garbage = DeferredFree(scheduler)
        self.garbage = garbage
        compiler = Compiler(machine, arch, profile, verdict, garbage, lock)
        self.compiler = compiler
        text.before_first_change.append(compiler.load)
        split_jumps = PartialJumpDetector(machine, verdict, arch, table, poker)
        self.split_jumps = split_jumps
        hits = HitHandling(machine, arch, compiler, split_jumps)
        self.hits = hits
        self._report = hits.failures.report
        self.sites: FtraceSites | None = None
        if profile.ftrace:
            self.sites = FtraceSites(machine, arch, hits, compiler, poker, split_jumps, lock)
        routes = BreakpointDispatch(machine, arch, table, hits, compiler, poker, split_jumps, self.sites)
        self.routes = routes
        self.trampoline = None if self.sites is None else (self.sites.trampoline, self.sites.trampoline_size)
        """Address and size in bytes of the code that armed fentry sites call; None without fentry sites."""
        copies = InsnCopier(text, image, verdict, arch, routes, profile, rules, garbage)
        self._copies = copies
        self.slots = copies.slots
        breakpoints = Breakpoints(text, arch, poker)
        self.optimizer: Optimizer | None = None
        if strategy is not None:
            self.optimizer = (Djprobes if strategy.by_commit else Optimizer)(
                table, verdict, arch, text, poker, routes, breakpoints, copies, garbage, scheduler, profile
            )
        self._arming = Arming(table, routes, breakpoints, self.sites, self.optimizer, copies, log)

    def tables_changed(self) -> None:
        """Read the image's symbols and text tables again, after a module was loaded or unloaded."""
        self.lock.assert_held()
        self.probe_checker.tables_changed()

    def entry_code(self, ops: FtraceOps) -> EntryCode[Any]:
        """Return an EntryCode, which compiles the guest code that the fentry sites of `ops` call.

        Precondition: the kernel has fentry sites.
        """
        assert self.sites is not None
        return EntryCode(self.sites, self.compiler, self.split_jumps, ops)

    def kill_within(self, spans: Sequence[tuple[int, int]]) -> None:
        """Mark as gone the probes in the address ranges `spans`, because this text is about to be freed.

        Each range has a start and an exclusive end.
        Mirrors: kernel/kprobes.c:kprobes_module_callback (v6.1).
        """
        self.lock.assert_held()
        self._arming.kill_within(spans)

    def __iter__(self) -> Iterator[Kprobe]:
        """Iterate over the users' probes in the order of kprobes/list; at one address, from the newest on."""
        for head in chain.from_iterable(self.table.buckets()):
            yield from head.by_run

    # Registration

    def register_kprobe(
        self,
        kprobe: Kprobe[Any],
        kind: str = KPROBE,
        on_assembled: Callable[[AssembledHandlers], None] = lambda _assembled: None,
    ) -> None:
        """Register a probe, and arm it unless it is disabled or all probes are disarmed.

        `kind`: letter for the kind of the probe in kprobes/list. `on_assembled`: called before the probe is
        armed, with its assembled handlers, if it has assembly handlers.

        Raises: KernelError EINVAL (not exactly one of symbol and address is given, registered already,
        blacklisted, not text, code that cannot be assembled, wrong `length` of a djprobe, the instruction
        cannot be copied), ENOENT (unknown symbol, or an address in no symbol), EILSEQ (not at an instruction,
        or at one that only raises an exception), EEXIST (second jprobe at the address, or an address in the
        code that a djprobe's jump replaces), EOPNOTSUPP (the instruction can be neither stepped nor emulated,
        or the probe has a field that this kernel's struct kprobe lacks), ENOSPC (no room for the breakpoint
        after the instruction's copy), ENOMEM (no memory for the probe's code or variables).
        Mirrors: kernel/kprobes.c:register_kprobe (v6.1).
        """
        self.lock.assert_held()
        addr, where, on_entry = self.places.locate(kprobe)
        if self.table.valid(kprobe) is not None:
            raise KernelError(errno.EINVAL, "the probe is registered already")
        self.places.check(where, addr)
        self._check_handlers(kprobe)
        given = kprobe.addr
        kprobe._kind = kind
        kprobe._takes_flags = kprobe.post_handler is not None and takes_flags(kprobe.post_handler)
        kprobe.addr = addr
        kprobe.nmissed = 0
        kprobe.raised = 0
        kprobe.flags = KprobeFlag.DISABLED if kprobe.disabled else KprobeFlag.NONE
        if on_entry:
            kprobe.flags |= KprobeFlag.ON_FUNC_ENTRY
        if addr in self.probe_checker.fentry:
            kprobe.flags |= KprobeFlag.FTRACE
        try:
            texts = handler_texts(kprobe)
            if texts:
                assembled = self.assemble(texts, kprobe.cells)
                kprobe._assembled = assembled
                on_assembled(assembled)
            self._insert(kprobe)
        except KernelError:
            kprobe.addr = given
            self._forget_assembly(kprobe)
            raise

        if kprobe.break_handler is not None:
            # The guest runs elsewhere from the pre_handler to the break_handler.
            self.set_runs_guest(kprobe, True)

    def set_runs_guest(self, owner: object, runs_guest: bool) -> None:
        """Record whether hits of an owner's probes run guest code in which other probes can be hit.

        `owner`: the probe itself, or the object that registers the probes.

        While this is so for any owner, compiled handlers check whether the CPU is already within a hit. If
        the need for this check begins or ends, all handlers are compiled again.
        """
        self.lock.assert_held()
        if self.compiler.current_kprobe.set_owner(owner, runs_guest):
            for head in self.table:
                if head.compiled is not None:
                    self.routes.drop_code(head)
                    self.routes.update(head)

    def assemble(self, texts: Mapping[HandlerPoint, str], cells: PerCpuVars) -> AssembledHandlers:
        """Return the assembled handlers of a probe.

        `texts`: point at which a handler runs -> its assembly text. `cells`: the per-CPU variables that the
        texts use.

        Raises: KernelError EINVAL (an error in a text), ENOMEM (no room for the variables).
        """
        return AssembledHandlers(texts, self._assembler, self._records, cells)

    def forget(self, assembled: AssembledHandlers) -> None:
        """Copy the variables of assembled handlers to Python; free the guest memory once no CPU can use it.

        Precondition: the guest code that contains the handlers was dropped.
        """
        self.lock.assert_held()
        assembled.detach()
        self.garbage.add((0, 0), assembled.free)

    def _forget_assembly(self, kprobe: Kprobe) -> None:
        assembled = kprobe._assembled
        kprobe._assembled = None
        if assembled is not None:
            kprobe.raised += assembled.faults
            self.forget(assembled)

    def _check_handlers(self, kprobe: Kprobe) -> None:
        """Check that this kernel's struct kprobe has the fields that the user has set.

        Only these fields are checked: fault_handler, break_handler, and the length of a djprobe.
        Raises: KernelError EOPNOTSUPP (the struct lacks a field that the user has set).
        """
        profile = self.profile
        if kprobe.fault_handler is not None and not profile.fault_handlers:
            raise KernelError(errno.EOPNOTSUPP, f"{profile.name} has no fault handlers")
        if kprobe.break_handler is not None and not profile.jprobes:
            raise KernelError(errno.EOPNOTSUPP, f"{profile.name} has no jprobes")
        if kprobe.length and profile.djprobe is None:
            raise KernelError(errno.EOPNOTSUPP, f"{profile.name} has no djprobes")

    def _insert(self, kprobe: Kprobe) -> None:
        rejection = self.optimizer.settle_length(kprobe) if isinstance(self.optimizer, Djprobes) else ""
        address = kprobe.address
        old = self.table.get(address)
        if old is not None:
            self._register_aggregate(old, kprobe)
            return
        head = AggrKprobe(address, self._report, kprobe.flags)
        head.rejection = rejection
        head.add(kprobe)
        head.refresh_handlers()
        if head.is_ftrace:
            self._copies.check_unpatched(address, self.probe_checker.fentry_size)
        else:
            self._copies.prepare(head)
        self.table.add(head)
        if not self.table.all_disarmed and not head.is_disabled:
            self._arming.arm(head)
        if kprobe.length or not head.is_disabled:
            # The region of a djprobe decides whether another djprobe can be registered near it.
            self._try_to_optimize(head, kprobe)

    def _finish_registration(self, head: AggrKprobe, kprobe: Kprobe) -> None:
        """Create the detour of probes that were registered disabled, if their address can have one.

        For an address with a single probe, _try_to_optimize() does this.

        Linux creates the detour at the registration. Deviates: the detour is created when a user asks for the
        probe's state, or before the probe is enabled. Many events are never enabled, and a detour takes
        memory and time.
        """
        if head.awaits_detour:
            head.awaits_detour = False
            if self.optimizer is not None and not head.is_gone:
                self.optimizer.prepare(head)
                self._refresh(head)
        elif not (head.is_aggregated or head.rejection or head.is_gone):
            self._try_to_optimize(head, kprobe)

    def _try_to_optimize(self, head: AggrKprobe, kprobe: Kprobe) -> None:
        """Create a detour for the only probe at an address, and queue the probe for optimization.

        If the address cannot have a detour, store the reason in `rejection`. A disabled probe is not queued.
        Mirrors: kernel/kprobes.c:try_to_optimize_kprobe (v6.1).
        """
        if self.optimizer is None or head.is_ftrace or not self.optimizer.wants(kprobe):
            return
        self.optimizer.prepare(head)
        if head.detour is not None:
            head.is_aggregated = True
            self._refresh(head)
            self.optimizer.optimize(head)

    def unregister_kprobe(self, kprobe: Kprobe[Any]) -> None:
        """Disarm and forget a probe. If the probe is not registered, only clear its address, as Linux does.

        Mirrors: kernel/kprobes.c:__unregister_kprobe_top, __unregister_kprobe_bottom (v6.1).
        """
        self.lock.assert_held()
        head = self.table.valid(kprobe)
        if head is None:
            kprobe.addr = None
            return
        self._disable(kprobe, head)
        self._remove_member(head, kprobe)
        self._forget_assembly(kprobe)
        if kprobe.break_handler is not None:
            self.set_runs_guest(kprobe, False)
        if kprobe.symbol_name is not None:
            # Linux keeps it, and refuses to register the structure again until its owner has cleared it.
            kprobe.addr = None

    def _remove_member(self, head: AggrKprobe, kprobe: Kprobe) -> None:
        head.remove(kprobe)
        self.table.changes += 1
        if head.is_aggregated:
            self._refresh(head)
        optimizer = self.optimizer
        if not head.members:
            if not head.is_disabled:
                # A jump was reused for a disabled probe.
                # Linux: it stays in the text permanently.
                self._disarm(head)
            # Linux: while the jump exists, the aggregator stays until the worker has removed the jump.
            if optimizer is None or not optimizer.is_queued(head):
                self.table.remove(head)
                self._release(head)
        elif optimizer is not None and not self.table.all_disarmed:
            optimizer.optimize(head)

    def _release(self, head: AggrKprobe) -> None:
        if self.optimizer is not None:
            self.optimizer.free(head)
        else:
            self._copies.release(head)

    def _register_aggregate(self, head: AggrKprobe, kprobe: Kprobe) -> None:
        """Add a probe at an address that is probed already.

        Raises: KernelError EEXIST (a second jprobe).

        Mirrors: kernel/kprobes.c:register_aggr_kprobe (v6.1).
        """
        if not head.is_aggregated:
            self._aggregate(head)
        if not (head.is_disabled and kprobe.is_disabled):
            self._finish_registration(head, kprobe)
        goes_elsewhere = is_jprobe(kprobe)
        if goes_elsewhere and head.jprobe is not None:
            raise KernelError(errno.EEXIST, f"{head.address:#x} has a jprobe already")
        if head.is_unused and self.optimizer is not None:
            # The last probe was removed, but its jump is still in the text.
            # Mirrors: reuse_unused_kprobe (v6.1).
            head.flags &= ~KprobeFlag.DISABLED
            self.optimizer.optimize(head)
        if head.is_gone:
            self._arming.revive(head)
        if self.optimizer is not None and (goes_elsewhere or has_post_handler(kprobe)):
            self.optimizer.unoptimize(head, force=True)
        head.add(kprobe)
        self.table.changes += 1
        self._refresh(head)
        if head.is_disabled and not kprobe.is_disabled:
            head.flags &= ~KprobeFlag.DISABLED
            self._refresh(head)
            if not self.table.all_disarmed:
                self._arming.arm(head)

    def _aggregate(self, head: AggrKprobe) -> None:
        """Mark an address with one probe as aggregated, before another is added; create no detour yet."""
        head.is_aggregated = True
        head.rejection = ""
        optimizer = self.optimizer
        [first] = head.members
        head.awaits_detour = (
            optimizer is not None and not (head.is_gone or head.is_ftrace) and optimizer.wants(first)
        )

    def _refresh(self, head: AggrKprobe) -> None:
        """Update the handling of hits after a change of the probes at an address or of their flags."""
        head.refresh_handlers()
        self.routes.drop_code(head)
        self._copies.boost_or_step(head)
        self.routes.update(head)

    def handler_changed(self, kprobe: Kprobe) -> None:
        """Drop the guest code of a probe, because its `program` emits other code, or no code, from now on."""
        self.lock.assert_held()
        self.table.changes += 1
        head = self.table.valid(kprobe)
        if head is not None:
            self.routes.drop_code(head)
            self.routes.update(head)

    def commit_kprobes(self) -> None:
        """Write the jumps of registered djprobes, and free the detours of unregistered ones.

        Raises: KernelError EOPNOTSUPP (this kernel has no djprobes), EBUSY (a task stays in the code that a
        jump is to replace).

        Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3.4.
        """
        self.lock.assert_held()
        if not isinstance(self.optimizer, Djprobes):
            raise KernelError(errno.EOPNOTSUPP, f"{self.profile.name} has no djprobes")
        self.optimizer.commit()

    # Enabling and arming

    def enable_kprobe(self, kprobe: Kprobe) -> None:
        """Enable a probe. Raises: KernelError EINVAL (it is not registered, or the probed code is gone).

        Mirrors: kernel/kprobes.c:enable_kprobe (v6.1).
        """
        self.lock.assert_held()
        head = self._head_of(kprobe)
        if kprobe.is_gone:
            raise KernelError(errno.EINVAL, "the probed code is gone")
        self._finish_registration(head, kprobe)
        # Linux: the flag of a single probe stays set while all probes are disarmed.
        if kprobe.is_disabled and (head.is_aggregated or not self.table.all_disarmed):
            kprobe.flags &= ~KprobeFlag.DISABLED
            head.enabled_members += 1
            self._refresh(head)
        if not self.table.all_disarmed and head.is_disabled:
            head.flags &= ~KprobeFlag.DISABLED
            self._refresh(head)
            self._arming.arm(head)

    def disable_kprobe(self, kprobe: Kprobe) -> None:
        """Disable a probe. Raises: KernelError EINVAL (the probe is not registered)."""
        self.lock.assert_held()
        self._disable(kprobe, self._head_of(kprobe))

    def _head_of(self, kprobe: Kprobe) -> AggrKprobe:
        """Return the table's entry for a probe. Raises: KernelError EINVAL (the probe is not registered)."""
        head = self.table.valid(kprobe)
        if head is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered")
        return head

    def _disable(self, kprobe: Kprobe, head: AggrKprobe) -> None:
        """Disable a probe, and disarm the probe's address if no other probe needs it to be armed.

        If the address has no aggregator, the probe is marked as disabled only after the address is
        disarmed. Until then, a hit of another CPU calls the probe's handler.
        Mirrors: kernel/kprobes.c:__disable_kprobe (v6.1).
        """
        if kprobe.is_disabled:
            return
        head.enabled_members -= 1
        if head.is_aggregated:
            kprobe.flags |= KprobeFlag.DISABLED
            self._refresh(head)
        if not head.enabled_members:
            self._disarm(head)

    def _disarm(self, head: AggrKprobe) -> None:
        if not self.table.all_disarmed and not head.is_disabled:
            self._arming.disarm(head)
        if not head.is_aggregated:
            for kprobe in head.members:
                kprobe.flags |= KprobeFlag.DISABLED
        head.flags |= KprobeFlag.DISABLED
        self._refresh(head)

    def resolve_probed_address(self, address: int) -> ProbedPlace | None:
        """Return the place in probed code for an address in an insn slot, detour or stub (compiled handler).

        Return None for other addresses.
        """
        for head in self.table:
            insn = head.insn
            slot = None if insn is None else insn.slot
            if insn is not None and slot is not None and -insn.lead <= address - slot < self._slot_size:
                return ProbedPlace(head.address + max(0, min(address - slot, insn.prepared.length)))
            for entry, code, region in head.codes():
                if not 0 <= address - code.address < code.size:
                    continue
                if address < code.copied:
                    return ProbedPlace(head.address, (entry, range(code.address, code.address + code.size)))
                if region is None:
                    return ProbedPlace(head.address)
                original = self._arch.original_place(region, code.copied, address)
                return ProbedPlace(original.address, pushed=original.pushed, is_calling=original.is_calling)
        return None

    def detour(self, kprobe: Kprobe) -> DetourBuffer | None:
        """Return the detour of the probe's address, or None if it has no detour.

        If the detour's creation was put off at the registration, create the detour now. A detour may exist
        although no jump leads to it.
        """
        head = self.table.valid(kprobe)
        if head is None:
            return None
        self._finish_registration(head, kprobe)
        return head.detour

    def mode(self, kprobe: Kprobe) -> str:
        """Return the mode in which hits of a probe are handled now; see report.mode."""
        return report.mode(self.table, self.sites, kprobe)

    def reason(self, kprobe: Kprobe) -> str:
        """Return the rule that keeps the probe from a better mode, or "" in the best mode.

        See report.reason.
        """
        place = self.probe_checker.place_text
        return report.reason(self.table, self.sites, self.optimizer, kprobe, place)

    def why_unarmed(self, kprobe: Kprobe) -> str:
        """Return the reason why a probe cannot be hit now, or "" if it can be hit; see report.why_unarmed."""
        return report.why_unarmed(self.table, self.sites, kprobe)

    def set_ftrace_enabled(self, value: int) -> None:
        """Set sysctl kernel.ftrace_enabled to `value`.

        0 makes all fentry sites nops. Any other value restores the calls at the sites that have users.

        Raises: KernelError EOPNOTSUPP (no fentry sites).
        """
        self.lock.assert_held()
        if self.sites is None:
            raise KernelError(errno.EOPNOTSUPP, "built without ftrace")
        self.sites.enable(value)
        self._notify_switched()

    def _notify_switched(self) -> None:
        for listener in self.after_switch:
            listener()

    def set_optimization(self, allowed: bool) -> None:
        """Allow or forbid jump optimization. Raises: KernelError EOPNOTSUPP (no optimizer).

        Mirrors: kernel/kprobes.c:proc_kprobes_optimization_handler (v6.1).
        """
        self.lock.assert_held()
        if self.optimizer is None:
            raise KernelError(errno.EOPNOTSUPP, "built without jump optimization")
        if allowed == self.optimizer.allowed:
            return
        self.optimizer.allow(allowed)
        self._log(report.OPTIMIZATION_MESSAGES[allowed])

    def set_optimized(self, kprobe: Kprobe, wanted: bool) -> None:
        """Request the optimization of a probe's address; if `wanted` is False, keep the address unoptimized.

        Raises: KernelError EINVAL (not registered), EOPNOTSUPP (a rule forbids the jump, or a post_handler
        needs the end of the step), and the errors of Optimizer.ask().
        """
        self.lock.assert_held()
        head = self._head_of(kprobe)
        self._finish_registration(head, kprobe)
        optimizer = self.optimizer
        if optimizer is not None and wanted and not head.is_aggregated and not head.is_gone:
            head.rejection = optimizer.ask(kprobe)
            self._try_to_optimize(head, kprobe)
        if optimizer is not None and head.detour is not None:
            optimizer.hold(head, not wanted)
            if not wanted or not head.has_post_handler:
                return
        if wanted:
            raise KernelError(errno.EOPNOTSUPP, self.reason(kprobe))

    # Stops after each step of patching

    def set_stages(self, on: bool, delay: int | None = None) -> None:
        """Make the writing or removal of a jump stop after each step of patching, if `on` is True.

        If `on` is False, complete the changes that have stopped, and stop no more; see PatchStages.switch().

        `delay` is the number of jiffies after which a stop ends by itself; None: only next_stage() ends
        stops.
        Raises: KernelError EOPNOTSUPP (no optimizer).
        """
        self.lock.assert_held()
        if self.optimizer is None:
            raise KernelError(errno.EOPNOTSUPP, "built without jump optimization")
        self.optimizer.stop_changes(on, delay)

    def next_stage(self) -> None:
        """Write the next step of patching for each jump whose writing or removal has stopped.

        After set_stages(True), the writing or removal of a probe's jump stops after each step.

        Raises: KernelError EINVAL (no writing or removal has stopped).
        """
        self.lock.assert_held()
        if self.optimizer is None or not self.optimizer.stages:
            raise KernelError(errno.EINVAL, "no change of text has stopped")
        self.optimizer.stages.go_on()

    # Files in debugfs

    def set_enabled(self, enabled: bool) -> None:
        """Arm all probes if `enabled` is True, else disarm them, as a write to kprobes/enabled does."""
        self.lock.assert_held()
        if enabled:
            self._arming.arm_all()
        else:
            self._arming.disarm_all()
        self._notify_switched()

    def list_records(self, start: int) -> Iterator[str]:
        """Iterate over the text of kprobes/list: the lines of each hash bucket, from bucket `start` on."""
        for probes in self.table.buckets(start):
            yield report.bucket_text(probes, self.symbols, self._bits)

    def stages_text(self) -> str:
        """Return the first line of kprobes/stages: "1" if patching stops after each step, otherwise "0".

        The number of milliseconds after which a stop ends by itself follows the "1", unless only next_stage()
        ends stops.
        """
        stages = None if self.optimizer is None else self.optimizer.stages
        if stages is None or not stages.is_on:
            return "0"
        return "1" if stages.delay is None else f"1 {stages.delay * 1000 // HZ}"

    def stopped_lines(self) -> Iterator[str]:
        """Iterate over the other lines of kprobes/stages: one for each probe where patching has stopped."""
        optimizer = self.optimizer
        if optimizer is None or not optimizer.stages:
            return
        for probes in self.table.buckets():
            yield from report.stopped_lines(probes, optimizer, self.symbols, self._bits)

    def blacklist_text(self) -> list[str]:
        """Return the lines of kprobes/blacklist."""
        return [*report.blacklist_lines(self._image.blacklist, self.symbols, self._bits)]
