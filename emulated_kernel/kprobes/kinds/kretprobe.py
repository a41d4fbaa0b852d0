"""Kretprobe: a probe on a function's return, with the entry probe that hooks it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Container, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

from emulated_kernel.arch.analysis.probe_rules import ProbeRule, probe_rules_named
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.aggr_kprobe import KRETPROBE
from emulated_kernel.kprobes.codegen.asm_handlers import AssembledHandlers, HandlerPoint
from emulated_kernel.kprobes.kprobe import CompileHandler, Kprobe, RegsT
from emulated_kernel.kprobes.profile import TrampolineForm
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.return_hook import RethookNode, ReturnHook
from emulated_kernel.kprobes.return_hook.return_hooks import ReturnHooks
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field

KRETPROBE_MAX_DATA_SIZE = 4096
_MIN_MAXACTIVE = 10
_CLEARED_DATA_SIZE = 64
"""Maximum size in bytes of a call's data that guest code clears; Python handles calls with more data."""


class KretprobeInstance(RethookNode):
    """One call of the probed function, from its entry to its return; handlers get it as an argument.

    Mirrors: include/linux/kprobes.h:struct kretprobe_instance (v6.1).
    """

    __slots__ = ()

    @property
    def rp(self) -> Kretprobe:
        """The return probe of this call. Mirrors: include/linux/kprobes.h:get_kretprobe (v6.1)."""
        probe = self.hook.probe
        assert isinstance(probe, Kretprobe)
        return probe


KretprobeHandler: TypeAlias = Callable[[KretprobeInstance, RegsT], object]
"""Function that takes the call and the registers at the call's entry or return."""


@dataclass(eq=False, slots=True)
class Kretprobe(Kprobe[RegsT]):
    """A probe on the return of a function; `symbol_name` or `addr` is the function's entry.

    `entry_handler(instance, regs)` runs when the function is entered. If it returns a true value, the return
    of this call is ignored. `handler(instance, regs)` runs when the function returns; regs.ip is the address
    that it returns to. At most `maxactive` calls can be pending; further calls are missed. If `maxactive` is
    0, the number of CPUs decides. `data_size` bytes of `instance.data` belong to the call. Handlers must not
    sleep.

    Mirrors: include/linux/kprobes.h:struct kretprobe (v6.1).
    """

    handler: KretprobeHandler[RegsT] | None = None
    """Called when the function returns."""
    return_program: CompileHandler | None = None
    """Function that emits guest code in place of `handler`; None: there is no such code.

    It is called with EntryKind.RETURN. After a change of the emitted code, call Kretprobes.handler_changed().
    """
    return_code: str | None = None
    """A handler in assembly for returns, or None. It shares `cells` with `code`, the handler for entries."""
    entry_handler: KretprobeHandler[RegsT] | None = None
    """Called when the function is entered."""
    maxactive: int = 0
    """Maximum number of pending calls; 0 selects a default at registration."""
    data_size: int = 0
    """Size in bytes of the data that belong to each call; at most 4096."""
    instances_missed_at: int = field(default=0, metadata=ADDRESS)
    """Address of an int in the guest that shows `instances_missed` there; 0 if there is none."""
    hook: ReturnHook | None = field(default=None, init=False, repr=False)
    _ended: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    """Counts at the last unregistration: number of missed calls, and number of handled returns."""

    @property
    def instances_missed(self) -> int:
        """Number of calls missed because no instance or no room for `return_code` was left.

        `nmissed` includes these calls.
        """
        return self._ended[0] if self.hook is None else self.hook.missed

    @property
    def returns(self) -> int:
        """Number of handled returns of the probed function."""
        return self._ended[1] if self.hook is None else self.hook.returned

    @property
    def nmissed(self) -> int:
        """Number of calls that were not handled: missed hits of the entry, and `instances_missed`."""
        return self._missed + self.instances_missed

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        self._missed = value - self.instances_missed


def default_maxactive(cpus: int, *, has_minimum: bool) -> int:
    """Return the maxactive of a return probe that is registered without one.

    The result is the number of CPUs. If `has_minimum` is True, it is twice this number, or _MIN_MAXACTIVE if
    that is more.
    `has_minimum`: whether the kernel is preemptible, or ProbeRule.MAXACTIVE_TEN is one of its rules.
    Mirrors: kernel/kprobes.c:register_kretprobe (v6.1).
    """
    return max(_MIN_MAXACTIVE, 2 * cpus) if has_minimum else cpus


def check_returns(address: int, blacklist: Container[int]) -> None:
    """Check that the return of the function at `address` can be hooked.

    `blacklist`: addresses of functions whose returns cannot be hooked.
    Raises: KernelError EINVAL (the function is in `blacklist`).
    """
    if address in blacklist:
        raise KernelError(errno.EINVAL, f"{address:#x} doesn't return to its caller")


class Kretprobes:
    """All kretprobes of one kernel.

    Mirrors: kernel/kprobes.c, the part under CONFIG_KRETPROBES (v6.1).
    """

    def __init__(
        self, kprobes: Kprobes, hooks: ReturnHooks, *, cpus: int, blacklist: Callable[[], Sequence[int]]
    ) -> None:
        """Create the registry. `cpus`: number of CPUs, from which the default of `maxactive` follows.

        `blacklist` returns the addresses of functions whose returns cannot be hooked. It is called once, when
        the first kretprobe is registered.
        """
        self._kprobes = kprobes
        self._hits = kprobes.hits
        self.hooks = hooks
        self._find_blacklist = blacklist
        profile = kprobes.profile
        has_minimum = profile.preemption or ProbeRule.MAXACTIVE_TEN in probe_rules_named(profile.probe_rules)
        self.default_maxactive = default_maxactive(cpus, has_minimum=has_minimum)

    @cached_property
    def _blacklist(self) -> frozenset[int]:
        return frozenset(self._find_blacklist())

    def register_kretprobe(self, rp: Kretprobe[Any]) -> None:
        """Register a probe on a function's return.

        Raises: KernelError EINVAL (not a function's entry, its return cannot be hooked, registered already,
        it has a `post_code`), E2BIG (data_size is too large), EOPNOTSUPP (the function has no fentry site,
        but the unified shadow stack needs one), ENOMEM, errors of register_kprobe().
        Mirrors: kernel/kprobes.c:register_kretprobe (v6.1).
        """
        address = self._kprobes.places.function_entry(rp)
        if self._kprobes.table.valid(rp) is not None:
            raise KernelError(errno.EINVAL, "the probe is registered already")
        check_returns(address, self._blacklist)
        if self.hooks.stack.needs_fentry and address not in self._kprobes.probe_checker.fentry:
            raise KernelError(errno.EOPNOTSUPP, f"{address:#x} can't be traced, so its return isn't hooked")
        if rp.post_code is not None:
            raise KernelError(errno.EINVAL, "post_code: a return probe has none; give return_code")
        if rp.data_size > KRETPROBE_MAX_DATA_SIZE:
            raise KernelError(errno.E2BIG, f"more than {KRETPROBE_MAX_DATA_SIZE} bytes of data")
        if rp.maxactive <= 0:
            rp.maxactive = self.default_maxactive
        self._prepare(rp, address)
        try:
            self._kprobes.register_kprobe(rp, KRETPROBE, partial(_hook_assembly, rp))
        except KernelError:
            self._release(rp)
            raise
        assert rp.hook is not None
        rp.hook.place = rp.address

    def _prepare(self, rp: Kretprobe, address: int) -> None:
        rp.post_handler = None
        program = rp.return_program if rp.handler is not None else _nothing
        hook = self.hooks.add(self._return_handler(rp), rp.maxactive, rp.data_size, program)
        # A function with an fentry site is C, and is compiled without -fipa-ra, so callers rely on the
        # convention.
        hook.follows_convention = address in self._kprobes.probe_checker.mcount
        rp.hook = hook
        hook.probe = rp
        hook.missed_at = rp.instances_missed_at
        hook.node_type = KretprobeInstance
        rp.pre_handler = self._entry(rp, hook)
        rp.program = self._entry_program(rp, hook)

    def _entry_program(self, rp: Kretprobe, hook: ReturnHook) -> CompileHandler | None:
        """Return the program that hooks calls at the entry; None if Python must hook them.

        Python must hook them if the probe has an entry_handler, or more than _CLEARED_DATA_SIZE bytes of
        data.
        """
        native = self.hooks.native
        if native is None or rp.entry_handler is not None or rp.data_size > _CLEARED_DATA_SIZE:
            return None
        return lambda builder, way: native.emit_entry(builder, way, hook)

    def handler_changed(self, rp: Kretprobe) -> None:
        """Drop a probe's guest code, because its `return_program` emits other code or none from now on."""
        if rp.hook is not None:
            self.hooks.handler_changed(rp.hook)
            self._kprobes.handler_changed(rp)

    def _release(self, rp: Kretprobe) -> None:
        """Remove the return hook, and store its counts of missed calls and of returns in the probe."""
        hook = rp.hook
        if hook is not None:
            rp._ended = (hook.missed, hook.returned)
            rp.hook = None
            self.hooks.remove(hook)

    def unregister_kretprobe(self, rp: Kretprobe) -> None:
        """Unregister a probe. If the probe is not registered, only clear its address, as Linux does.

        Pending calls return without a call of the handler.
        """
        if rp.hook is not None:
            # Code that runs at returns must be dropped before its cells are freed.
            self.hooks.handler_changed(rp.hook)
            rp.hook.assembled = None
        self._kprobes.unregister_kprobe(rp)
        self._release(rp)

    # Hits

    def _entry(self, rp: Kretprobe, hook: ReturnHook) -> Callable[[Kprobe, Any], None]:
        """Return the entry probe's pre_handler, which hooks each call by `hook`.

        Mirrors: kernel/kprobes.c:pre_handler_kretprobe (v6.1).
        """
        hook_call = self.hooks.hook_call
        entry_handler = rp.entry_handler

        def wants(instance: KretprobeInstance, regs: Any) -> bool:
            assert entry_handler is not None
            try:
                return not entry_handler(instance, regs)
            except BaseException as error:
                self._hits.failures.report(rp, error)
                return True

        def entered(_kprobe: Kprobe, regs: Any) -> None:
            hook_call(hook, regs, None if entry_handler is None else wants)

        return entered

    def _return_handler(self, rp: Kretprobe) -> Callable[[KretprobeInstance, Any], None]:
        """Return the function by which the return hook calls the probe's handler at returns.

        Mirrors: kernel/kprobes.c:kretprobe_rethook_handler (v6.1).
        """
        ctlblk = self._hits.ctlblk
        table = self._kprobes.table
        by_breakpoint = self.hooks.trampoline.form is TrampolineForm.BREAKPOINT

        def returned(instance: KretprobeInstance, regs: Any) -> None:
            if rp.handler is None:
                return
            ctlblk.set_running(table.valid(rp), by_breakpoint=by_breakpoint)
            try:
                rp.handler(instance, regs)
            except BaseException as error:
                self._hits.failures.report(rp, error)
            ctlblk.set_running(None)

        return returned


def _hook_assembly(rp: Kretprobe, assembled: AssembledHandlers) -> None:
    assert rp.hook is not None
    if HandlerPoint.RETURN in assembled:
        rp.hook.assembled = assembled


def _nothing(_builder: ProgramBuilder, _way: EntryKind) -> bool:
    """Emit nothing and return True: this is the program of a probe without a handler."""
    return True
