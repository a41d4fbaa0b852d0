"""GuestProbes: probes that the guest's modules register, with handlers in the guest."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.kinds.jprobe import Jprobe, Jprobes
from emulated_kernel.kprobes.kinds.kretprobe import (
    KRETPROBE_MAX_DATA_SIZE,
    Kretprobe,
    KretprobeInstance,
    Kretprobes,
)
from emulated_kernel.kprobes.kprobe import Kprobe, KprobeFlag, Regs
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.traps.trap import BudgetExceeded, GuestFault, HardwareError, MemoryFault
from emulated_kernel.util.abi import KprobeOp
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field

_MAX_NAME = 512
_STACK_ALIGNMENT = 16
_INT = 0xFFFFFFFF
_FLAGS = {
    KprobeFlag.GONE: 1,
    KprobeFlag.DISABLED: 2,
    KprobeFlag.OPTIMIZED: 4,
    KprobeFlag.FTRACE: 8,
    KprobeFlag.ON_FUNC_ENTRY: 16,
}
"""Flag -> its mask in the field `flags` of a struct kprobe.

Mirrors: include/linux/kprobes.h:KPROBE_FLAG_* (v6.1).
"""


@dataclass(eq=False, slots=True)
class GuestKprobe(Kprobe):
    """The probe that a module of the guest describes by a struct kprobe in guest memory."""

    memory: GuestMemory = field(kw_only=True)
    missed_at: int = field(kw_only=True)
    """Address of the field `nmissed` in the structure."""

    @property
    def nmissed(self) -> int:
        return self.memory.read_word(self.missed_at)

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        # The owner may have freed the structure; the hit must not fail because of that.
        with suppress(MemoryFault):
            self.memory.write_word(self.missed_at, value)


@dataclass(eq=False, slots=True)
class GuestKretprobe(Kretprobe):
    """The return probe that a module of the guest describes by a struct kretprobe in guest memory."""

    memory: GuestMemory = field(kw_only=True)
    missed_at: int = field(kw_only=True)
    """Address of the field `kp.nmissed` in the structure, the number of missed hits of the entry."""

    @property
    def nmissed(self) -> int:
        return self.memory.read_word(self.missed_at) + self.instances_missed

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        # See GuestKprobe.nmissed.
        with suppress(MemoryFault):
            self.memory.write_word(self.missed_at, value - self.instances_missed)


@dataclass(frozen=True, eq=False)
class _GuestProbe:
    """A probe structure in guest memory, and the probe that was registered for it."""

    address: int
    probe: Kprobe | Jprobe
    functions: tuple[int, ...]
    """Addresses of the probe's handlers in the guest."""

    @property
    def kprobe(self) -> Kprobe:
        return self.probe.kp if isinstance(self.probe, Jprobe) else self.probe


class GuestProbes:
    """Registers probes at the guest's request (Hypercall.KPROBES), and calls their handlers in the guest.

    The handlers run on the stack of the interrupted task. While such probes exist, the host handles each
    breakpoint only after the emulator has stopped; see TrapHooks.guest_callers.
    """

    def __init__(
        self,
        kprobes: Kprobes,
        kretprobes: Kretprobes,
        jprobes: Jprobes | None,
        machine: Machine,
        arch: Arch,
        note: Callable[[str], None],
        log: Callable[[str], None],
    ) -> None:
        """Create the registry without probes.

        `log` writes a line to the kernel log. `note` is called during a hit, when the guest cannot write the
        log: it keeps a line, which is written later.
        """
        self._kprobes = kprobes
        self._kretprobes = kretprobes
        self._jprobes = jprobes
        self._machine = machine
        self._memory = machine.memory
        self._note = note
        self._log = log
        self._abi: Mapping[str, int] = machine.image.abi
        self._word = arch.word_size
        self._mask = (1 << arch.bits) - 1
        self._names = arch.pt_regs
        self._fixed = arch.fixed_registers
        self._sp = arch.registers.sp
        self._found: dict[int, _GuestProbe] = {}
        self._failed_handlers: set[int] = set()
        """Addresses of handlers that faulted or did not return."""
        if jprobes is not None and "host_jprobe_return" in self._abi:
            machine.memory.write_word(self._abi["host_jprobe_return"], jprobes.jprobe_return)

    def serve(self, op: int, probe: int, _unused: int) -> int:
        """Execute the call `op`, a KprobeOp, for the guest's structure at the address `probe`, and return 0.

        Raises: KernelError EFAULT (no such memory), EINVAL (unknown op, registered already, or not
        registered), EOPNOTSUPP (a jprobe, if the profile has none), errors of `Kprobes` and `Kretprobes`.
        """
        try:
            match op:
                case KprobeOp.REGISTER | KprobeOp.REGISTER_RETURN | KprobeOp.REGISTER_JPROBE:
                    self._register(KprobeOp(op), probe)
                case KprobeOp.UNREGISTER:
                    self._unregister(probe)
                case KprobeOp.ENABLE:
                    self._kprobes.enable_kprobe(self._known(probe).kprobe)
                case KprobeOp.DISABLE:
                    self._kprobes.disable_kprobe(self._known(probe).kprobe)
                case _:
                    raise KernelError(errno.EINVAL, f"unknown operation {op}")
            self._show_flags(probe)
        except MemoryFault as fault:
            raise KernelError(errno.EFAULT, str(fault)) from fault
        return 0

    # Registration

    def _known(self, probe: int) -> _GuestProbe:
        found = self._found.get(probe)
        if found is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered")
        return found

    def _register(self, op: KprobeOp, probe: int) -> None:
        if probe in self._found:
            raise KernelError(errno.EINVAL, "the probe is registered already")
        match op:
            case KprobeOp.REGISTER:
                made = self._register_kprobe(probe)
            case KprobeOp.REGISTER_RETURN:
                made = self._register_return(probe)
            case _:
                made = self._register_jprobe(probe)
        self._found[probe] = made
        self._failed_handlers.difference_update(made.functions)
        self._write(probe, "kprobe.addr", made.kprobe.address)
        self._callers_changed()

    def _place(self, probe: int) -> dict[str, Any]:
        name = self._read(probe, "kprobe.symbol_name")
        text = self._memory.read_cstring(name, _MAX_NAME).decode("latin-1") if name else None
        return {
            "symbol_name": text,
            "addr": self._read(probe, "kprobe.addr") or None,
            "offset": self._read_int(probe, "kprobe.offset"),
        }

    def _is_disabled(self, probe: int) -> bool:
        return bool(self._read_int(probe, "kprobe.flags") & _FLAGS[KprobeFlag.DISABLED])

    def _register_kprobe(self, probe: int) -> _GuestProbe:
        before = self._read(probe, "kprobe.pre_handler")
        after = self._read(probe, "kprobe.post_handler")

        def pre_handler(kprobe: Kprobe, regs: Regs) -> int:
            return self._call(kprobe, before, regs, probe)

        def post_handler(kprobe: Kprobe, regs: Regs) -> None:
            self._call(kprobe, after, regs, probe, 0)

        kprobe = GuestKprobe(
            **self._place(probe),
            pre_handler=pre_handler if before else None,
            post_handler=post_handler if after else None,
            disabled=self._is_disabled(probe),
            memory=self._memory,
            missed_at=probe + self._abi["kprobe.nmissed"],
        )
        self._kprobes.register_kprobe(kprobe)
        return _GuestProbe(probe, kprobe, (before, after))

    def _register_return(self, probe: int) -> _GuestProbe:
        entry = self._read(probe, "kretprobe.entry_handler")
        leave = self._read(probe, "kretprobe.handler")
        header = self._abi["kretprobe_instance.data"]
        size = self._read(probe, "kretprobe.data_size")
        if size > KRETPROBE_MAX_DATA_SIZE - header:
            # Linux: the data alone may have this many bytes, without the header.
            raise KernelError(errno.E2BIG, f"more than {KRETPROBE_MAX_DATA_SIZE - header} bytes of data")

        def entry_handler(instance: KretprobeInstance, regs: Regs) -> int:
            return self._call(rp, entry, regs, self._instance(probe, instance))

        def handler(instance: KretprobeInstance, regs: Regs) -> None:
            self._call(rp, leave, regs, self._instance(probe, instance))

        rp = GuestKretprobe(
            **self._place(probe),
            handler=handler if leave else None,
            entry_handler=entry_handler if entry else None,
            maxactive=_signed(self._read_int(probe, "kretprobe.maxactive")),
            data_size=header + size,
            disabled=self._is_disabled(probe),
            memory=self._memory,
            missed_at=probe + self._abi["kprobe.nmissed"],
            instances_missed_at=probe + self._abi["kretprobe.nmissed"],
        )
        self._kretprobes.register_kretprobe(rp)
        self._write_int(probe, "kretprobe.maxactive", rp.maxactive)
        return _GuestProbe(probe, rp, (entry, leave))

    def _instance(self, probe: int, instance: KretprobeInstance) -> int:
        """Fill in the guest's struct kretprobe_instance for a call, and return the structure's address.

        `probe`: address of the struct kretprobe. `instance`: the call.
        """
        address = instance.data_address
        self._write(address, "kretprobe_instance.rp", probe)
        self._write(address, "kretprobe_instance.ret_addr", instance.ret_addr)
        self._write(address, "kretprobe_instance.task", instance.task)
        self._write(address, "kretprobe_instance.fp", instance.frame)
        return address

    def _register_jprobe(self, probe: int) -> _GuestProbe:
        if self._jprobes is None:
            raise KernelError(errno.EOPNOTSUPP, f"{self._kprobes.profile.name} has no jprobes")
        place = self._place(probe)
        entry = self._read(probe, "jprobe.entry")
        jprobe = Jprobe(entry, symbol_name=place["symbol_name"], addr=place["addr"])
        jprobe.kp.offset = place["offset"]
        jprobe.kp.disabled = self._is_disabled(probe)
        self._jprobes.register_jprobe(jprobe)
        return _GuestProbe(probe, jprobe, (entry,))

    def _unregister(self, probe: int) -> None:
        found = self._found.pop(probe, None)
        if found is None:
            self._write(probe, "kprobe.addr", 0)
            return
        if isinstance(found.probe, Jprobe):
            assert self._jprobes is not None
            self._jprobes.unregister_jprobe(found.probe)
        elif isinstance(found.probe, Kretprobe):
            self._kretprobes.unregister_kretprobe(found.probe)
        else:
            self._kprobes.unregister_kprobe(found.probe)
        self._callers_changed()

    def _callers_changed(self) -> None:
        calls = any(not isinstance(each.probe, Jprobe) for each in self._found.values())
        self._machine.hooks.set_guest_caller(self, calls)
        self._kprobes.set_runs_guest(self, calls)

    def _show_flags(self, probe: int) -> None:
        found = self._found.get(probe)
        if found is not None:
            shown = sum(bit for flag, bit in _FLAGS.items() if flag in found.kprobe.flags)
            self._write_int(probe, "kprobe.flags", shown)

    def forget_within(self, spans: Iterable[tuple[int, int]], module: str) -> None:
        """Unregister probes whose structure or handlers are in memory that is about to be freed.

        `spans`: address ranges of this memory, each as start and exclusive end. `module`: name of the
        module, for the kernel log. Deviates: Linux leaves the probes registered, and jumps to freed memory
        at the next hit.
        """
        ranges = [range(*span) for span in spans]
        for found in list(self._found.values()):
            if any(at in span for at in (found.address, *found.functions) for span in ranges):
                self._log(f"module {module}: its probe at {found.kprobe.address:#x} is unregistered")
                self._unregister(found.address)

    # Hits

    def _call(self, kprobe: Kprobe, handler: int, regs: Regs, first: int, *more: int) -> int:
        """Call the guest function `handler` at a hit, and return the function's result, an int.

        The arguments of the function are `first`, the address of a struct pt_regs with `regs`, and `more`.
        The function may change all registers in the structure except sp. A function that faults, loops or
        sleeps is never called again; its result is 0. In Linux, such a function causes an oops in the
        probed task.
        """
        if handler in self._failed_handlers:
            return 0
        machine = self._machine
        ctlblk = self._kprobes.hits.ctlblk
        depth = len(ctlblk.interrupted)
        memory = self._memory
        word = self._word
        size = len(self._names) * word
        frame = (machine.regs.sp - size) // _STACK_ALIGNMENT * _STACK_ALIGNMENT
        values = [getattr(regs, name, self._fixed.get(name, 0)) & self._mask for name in self._names]
        count = machine.per_cpu_bases[machine.cpu] + self._abi["percpu.preempt_count"]
        try:
            memory.write(frame, b"".join(value.to_bytes(word, "little") for value in values))
            preempt_count = memory.read_u32(count)
            memory.write_u32(count, preempt_count + 1)
            ctlblk.enter_python()
            try:
                result = machine.calls.call_within(handler, first, frame, *more, sp=frame)
            finally:
                ctlblk.leave_python()
                memory.write_u32(count, preempt_count)
            data = memory.read(frame, size)
        except (GuestFault, BudgetExceeded, HardwareError, MemoryFault) as fault:
            ctlblk.restore_to(depth)
            self._failed_handlers.add(handler)
            where = kprobe.symbol_name or f"{kprobe.address:#x}"
            self._note(f"a handler of the probe at {where} was given up: {fault}")
            return 0
        for index, (name, old) in enumerate(zip(self._names, values, strict=True)):
            new = int.from_bytes(data[index * word : (index + 1) * word], "little")
            if new != old and name != self._sp and name not in self._fixed:
                setattr(regs, name, new)
        return result & _INT

    # The guest's structures

    def _read(self, at: int, member: str) -> int:
        return self._memory.read_word(at + self._abi[member])

    def _read_int(self, at: int, member: str) -> int:
        return self._memory.read_u32(at + self._abi[member])

    def _write(self, at: int, member: str, value: int) -> None:
        self._memory.write_word(at + self._abi[member], value)

    def _write_int(self, at: int, member: str, value: int) -> None:
        self._memory.write_u32(at + self._abi[member], value & _INT)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
