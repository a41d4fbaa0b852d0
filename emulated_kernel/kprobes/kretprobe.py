"""Kretprobe: a probe on a function's return; the entry probe that hooks it, and what both share."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.ctlblk import HitStatus
from emulated_kernel.kprobes.hit import HitHandling
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.kprobes.profile import TrampolineForm
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hooks import Instance, ReturnHook, ReturnHooks
from emulated_kernel.machine.traps import MemoryFault

KRETPROBE_MAX_DATA_SIZE = 4096
_MIN_MAXACTIVE = 10

KretprobeInstance = Instance
"""What handlers get: one call of the probed function, from its entry to its return."""
KretprobeHandler = Callable[[KretprobeInstance, Regs], object]


@dataclass(eq=False, slots=True)
class Kretprobe(Kprobe):
    """A probe on the return of a function, named as a Kprobe is: by its entry.

    `entry_handler(instance, regs)` runs when the function is entered; a true result means that this call
    isn't of interest. `handler(instance, regs)` runs when it returns, with regs.ip where it returns to.
    `maxactive` calls can be pending at a time (0: a default by the number of CPUs); a call more is missed.
    `data_size` bytes of `instance.data` belong to the call. Handlers must not sleep.
    Mirrors: include/linux/kprobes.h:struct kretprobe (v6.1).
    """

    handler: KretprobeHandler | None = None
    entry_handler: KretprobeHandler | None = None
    maxactive: int = 0
    data_size: int = 0
    instances_missed: int = field(default=0, init=False)
    """Calls missed for want of an instance; `nmissed` counts them too."""
    returns: int = field(default=0, init=False)
    """Calls whose return was seen."""
    hook: ReturnHook | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.kind = "r"


class Kretprobes:
    """All kretprobes of one kernel. Callers hold the kernel's control lock.

    Mirrors: kernel/kprobes.c, the part under CONFIG_KRETPROBES (v6.1).
    """

    def __init__(self, kprobes: Kprobes, hooks: ReturnHooks, *, cpus: int, blacklist: Sequence[int]) -> None:
        """`blacklist`: addresses of functions whose return can't be hooked."""
        self._kprobes = kprobes
        self._hits: HitHandling = kprobes.hits
        self.hooks = hooks
        self._blacklist = frozenset(blacklist)
        preemption = kprobes.profile.preemption
        self._default_maxactive = max(_MIN_MAXACTIVE, 2 * cpus) if preemption else cpus

    def register_kretprobe(self, rp: Kretprobe) -> None:
        """Register a probe on a function's return.

        Raises: KernelError EINVAL (not a function's entry, its return can't be hooked, registered already),
        E2BIG (data_size), EOPNOTSUPP (unified, and not traceable), ENOMEM, and as register_kprobe.
        Mirrors: kernel/kprobes.c:register_kretprobe (v6.1).
        """
        address = self._kprobes.function_entry(rp)
        if self._kprobes.head(rp) is not None:
            raise KernelError(errno.EINVAL, "the probe is registered already")
        if address in self._blacklist:
            raise KernelError(errno.EINVAL, f"{address:#x} doesn't return to its caller")
        if self.hooks.stack.needs_fentry and not self._kprobes.has_fentry(address):
            raise KernelError(errno.EOPNOTSUPP, f"{address:#x} can't be traced, so its return isn't hooked")
        if rp.data_size > KRETPROBE_MAX_DATA_SIZE:
            raise KernelError(errno.E2BIG, f"more than {KRETPROBE_MAX_DATA_SIZE} bytes of data")
        if rp.maxactive <= 0:
            rp.maxactive = self._default_maxactive
        self._prepare(rp)
        try:
            self._kprobes.register_kprobe(rp)
        except KernelError:
            self._release(rp)
            raise
        assert rp.hook is not None
        rp.hook.place = rp.address

    def _prepare(self, rp: Kretprobe) -> None:
        rp.instances_missed = rp.returns = 0
        rp.post_handler = None
        rp.hook = self.hooks.add(self._return_handler(rp), rp.maxactive, rp.data_size)
        rp.pre_handler = self._entry(rp, rp.hook)

    def _release(self, rp: Kretprobe) -> None:
        if rp.hook is not None:
            self.hooks.remove(rp.hook)
            rp.hook = None

    def register_kretprobes(self, rps: Sequence[Kretprobe]) -> None:
        """Register all or none. Raises: as register_kretprobe; EINVAL for an empty sequence."""
        if not rps:
            raise KernelError(errno.EINVAL, "no probes given")
        for done, rp in enumerate(rps):
            try:
                self.register_kretprobe(rp)
            except KernelError:
                self.unregister_kretprobes(rps[:done])
                raise

    def unregister_kretprobe(self, rp: Kretprobe) -> None:
        """Calls that are pending return without the handler. One that isn't registered is ignored."""
        self._kprobes.unregister_kprobe(rp)
        self._release(rp)

    def unregister_kretprobes(self, rps: Sequence[Kretprobe]) -> None:
        for rp in rps:
            self.unregister_kretprobe(rp)

    def enable_kretprobe(self, rp: Kretprobe) -> None:
        """See Kprobes.enable_kprobe."""
        self._kprobes.enable_kprobe(rp)

    def disable_kretprobe(self, rp: Kretprobe) -> None:
        """See Kprobes.disable_kprobe; calls that are pending are still seen."""
        self._kprobes.disable_kprobe(rp)

    # Hits

    def _entry(self, rp: Kretprobe, hook: ReturnHook) -> Callable[[Kprobe, Any], None]:
        """Mirrors: kernel/kprobes.c:pre_handler_kretprobe (v6.1)."""
        hooks = self.hooks

        def entered(_kprobe: Kprobe, regs: Any) -> None:
            instance = hooks.try_get(hook)
            if instance is None:
                _miss(rp)
                return
            if self._is_refused(rp, instance, regs):
                hooks.recycle(instance)
                return
            try:
                hooks.hook(instance, regs)
            except MemoryFault:
                # Linux: a fault in the handler. Deviates: what has no stack has no return either.
                hooks.recycle(instance)
                _miss(rp)

        return entered

    def _is_refused(self, rp: Kretprobe, instance: Instance, regs: Any) -> bool:
        """Whether the entry_handler doesn't want this call."""
        if rp.entry_handler is None:
            return False
        try:
            return bool(rp.entry_handler(instance, regs))
        except BaseException as error:
            self._hits.report(rp, error)
            return False

    def _return_handler(self, rp: Kretprobe) -> Callable[[Instance, Any], None]:
        """Mirrors: kernel/kprobes.c:kretprobe_rethook_handler (v6.1)."""
        ctlblk = self._hits.ctlblk
        by_breakpoint = self.hooks.trampoline.form is TrampolineForm.BREAKPOINT

        def returned(instance: Instance, regs: Any) -> None:
            rp.returns += 1
            if rp.handler is None:
                return
            ctlblk.running, ctlblk.status, ctlblk.by_breakpoint = rp, HitStatus.ACTIVE, by_breakpoint
            try:
                rp.handler(instance, regs)
            except BaseException as error:
                self._hits.report(rp, error)
            ctlblk.running = None

        return returned


def _miss(rp: Kretprobe) -> None:
    rp.nmissed += 1
    rp.instances_missed += 1
