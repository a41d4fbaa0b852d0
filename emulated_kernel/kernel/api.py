"""Kernel: the public API of kprobefs's own kernel. Its methods take the control lock and forward calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.guests.builtin.mounts.mounts import Mounts
from emulated_kernel.guests.builtin.trees.root_layout import RootLayout, build_filesystem
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.kernel.builder import build
from emulated_kernel.kprobes.kinds.batch import register_all
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kinds.hit_ring import HitRing
from emulated_kernel.kprobes.kinds.jprobe import Jprobe, Jprobes
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe, Regs, RegsT
from emulated_kernel.kprobes.probe_text import ProbeText
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.machine.guest_info import Message, ModuleInfo
from emulated_kernel.trace.symbols import sprint_symbol
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import HostReadingFile
from emulated_kernel.vfs.core.node import Node, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile, Steps, finish
from emulated_kernel.vfs.mount import Mount

_ROOT = Client(pid=0, uid=0, gid=0)
_READ_SIZE = 1 << 16
"""Size of one read in bytes. A shorter read does not mean the end of the file."""


class Kernel:
    """A booted kernel whose functions can be probed; also a context manager that frees it.

        with Kernel() as kernel:
            kernel.register_kprobe(Kprobe(symbol_name="int_sqrt", pre_handler=...))
            kernel.call("int_sqrt", 144)

    `config` describes the emulated computer; None: the defaults. `profile`, if given, replaces the profile
    that `config` names, and may combine build options as no preset does. `watch` reports host processes to
    the guest. `lock` is given if this kernel is to replace another one by replace_kernel(): the held lock of
    the other kernel.

    Methods may be called from any thread: each takes the control lock. Hold `lock` around several calls to
    make them one step. After close(), each method raises KernelError ENODEV.

    A probe's handler may call methods that access text, symbols, memory, registers and the clock, and methods
    that report a probe's state. All other methods raise KernelError EDEADLK in a handler.

    Raises: KernelError ENOENT (unknown architecture), ENOEXEC (no image, or one that does not boot), OSError
    (the image cannot be read).
    """

    def __init__(
        self,
        config: MachineConfig | None = None,
        watch: ProcessWatch | None = None,
        profile: Profile | None = None,
        lock: ControlLock | None = None,
    ) -> None:
        """Boot the kernel to its first system call. The class describes the parameters."""
        parts = build(config or MachineConfig(), watch or ProcessWatch(), profile, lock)
        self.components = parts
        self.config = parts.config
        self.lock = parts.lock
        self.arch = parts.arch
        self.live = parts.live
        self.image = parts.live.core
        self.machine = parts.machine
        self.guest = parts.guest
        self.modules = parts.modules
        self.loads = parts.loads
        self.kprobes = parts.engine.kprobes
        self.kretprobes = parts.engine.kretprobes
        self.fprobes = parts.engine.fprobes
        self.tracing = parts.tracing
        self.trace_arrays = parts.tracing.arrays
        self.trace = parts.tracing.arrays.top.array
        self._mounts = Mounts(self.guest, self.lock, self.config.limits)
        self._probe_text = ProbeText(self.kprobes, self.arch, self.machine.text)
        self._is_closed = False

    # The lock

    def _check_open(self) -> None:
        """Raise KernelError ENODEV if the kernel is closed."""
        if self._is_closed:
            raise KernelError(errno.ENODEV, "the kernel is closed: create another one")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the control lock for an operation that handlers of probes may call too.

        Raises: KernelError ENODEV (closed).
        """
        with self.lock:
            self._check_open()
            yield

    @contextmanager
    def _control(self) -> Iterator[None]:
        """Hold the control lock for an operation that may sleep.

        Linux: in a probe's handler, the operation would deadlock or cause "scheduling while atomic".

        Raises: KernelError ENODEV (closed), EDEADLK (in a probe's handler).
        """
        with self._locked():
            if self.machine.is_running:
                raise KernelError(
                    errno.EDEADLK, "a probe's handler must not sleep: wait until the hit has ended"
                )
            yield

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Hold the control lock for an operation that counts as a request, as those of a mount's clients do.

        Before the operation, the delayed work that is due is done. Raises: the errors of _control().
        """
        with self._control():
            self.components.requests.request_begins(by_program=True)
            yield

    # Kprobes

    def register_kprobe(self, kprobe: Kprobe[RegsT]) -> None:
        """Register a kprobe, and arm it unless it is disabled or all kprobes are disarmed.

        Raises: KernelError EINVAL (not exactly one of symbol and address, already registered, blacklisted,
        not in text, code that cannot be assembled), ENOENT (an unknown symbol, or an address in no symbol),
        EILSEQ (not at an instruction boundary), EOPNOTSUPP (a handler that the profile's kernel does not
        have), ENOMEM.

        Mirrors: kernel/kprobes.c:register_kprobe (v6.1).
        """
        with self._control():
            self.kprobes.register_kprobe(kprobe)

    def unregister_kprobe(self, kprobe: Kprobe[Any]) -> None:
        """Disarm and forget a kprobe. If the kprobe is not registered, only set its `addr` to None.

        If a jump to the detour is at the probed address, the optimizer removes the jump later, or when
        wait_for_kprobe_optimizer() is called.
        Raises: KernelError EDEADLK (in a handler).
        Mirrors: kernel/kprobes.c:unregister_kprobe (v6.1).
        """
        with self._control():
            self.kprobes.unregister_kprobe(kprobe)

    def enable_kprobe(self, kprobe: Kprobe[Any]) -> None:
        """Enable a registered kprobe, and arm it unless all kprobes are disarmed.

        Raises: KernelError EINVAL (not registered, or the probed code is gone).

        Mirrors: kernel/kprobes.c:enable_kprobe (v6.1).
        """
        with self._control():
            self.kprobes.enable_kprobe(kprobe)

    def disable_kprobe(self, kprobe: Kprobe[Any]) -> None:
        """Disable a registered kprobe: its handlers are not called until it is enabled again.

        Raises: KernelError EINVAL (not registered).

        Mirrors: kernel/kprobes.c:disable_kprobe (v6.1).
        """
        with self._control():
            self.kprobes.disable_kprobe(kprobe)

    def register_kprobes(self, kprobes: Sequence[Kprobe[Any]]) -> None:
        """Register kprobes in order. If one cannot be registered, unregister the kprobes before it.

        Raises: the errors of register_kprobe, and KernelError EINVAL (an empty sequence).

        Mirrors: kernel/kprobes.c:register_kprobes (v6.1).
        """
        with self._control():
            register_all(kprobes, self.kprobes.register_kprobe, self.kprobes.unregister_kprobe)

    def unregister_kprobes(self, kprobes: Iterable[Kprobe[Any]]) -> None:
        """Unregister kprobes in order.

        Raises: the errors of unregister_kprobe.

        Mirrors: kernel/kprobes.c:unregister_kprobes (v6.1).
        """
        for kprobe in kprobes:
            self.unregister_kprobe(kprobe)

    def commit_kprobes(self) -> None:
        """Write the jumps of all registered djprobes.

        Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3.4.

        Raises: KernelError EOPNOTSUPP (the profile's kernel has no djprobes), EBUSY (a task is in a replaced
        region).
        """
        with self._control():
            self.kprobes.commit_kprobes()

    def arm_all_kprobes(self) -> None:
        """Arm all enabled kprobes, as writing 1 to kprobes/enabled does.

        Raises: KernelError EDEADLK (in a handler).

        Mirrors: kernel/kprobes.c:arm_all_kprobes (v6.1).
        """
        with self._control():
            self.kprobes.set_enabled(True)

    def disarm_all_kprobes(self) -> None:
        """Disarm all kprobes, as writing 0 to kprobes/enabled does. The kprobes stay registered.

        Kprobes that are registered or enabled later stay disarmed until arm_all_kprobes() is called.

        Raises: KernelError EDEADLK (in a handler).

        Mirrors: kernel/kprobes.c:disarm_all_kprobes (v6.1).
        """
        with self._control():
            self.kprobes.set_enabled(False)

    # Kretprobes, fprobes, jprobes

    def register_kretprobe(self, rp: Kretprobe[RegsT]) -> None:
        """Register a probe on a function's return.

        Raises: the errors of register_kprobe, and KernelError EINVAL (not the entry of a function, or its
        return cannot be hooked), E2BIG (data_size is too large), EOPNOTSUPP (the unified shadow stack is
        used, and the function has no fentry site).

        Mirrors: kernel/kprobes.c:register_kretprobe (v6.1).
        """
        with self._control():
            self.kretprobes.register_kretprobe(rp)

    def unregister_kretprobe(self, rp: Kretprobe[Any]) -> None:
        """Unregister a return probe.

        The probe's handler is not called for calls that are still running.
        Raises: KernelError EDEADLK (in a handler).
        Mirrors: kernel/kprobes.c:unregister_kretprobe (v6.1).
        """
        with self._control():
            self.kretprobes.unregister_kretprobe(rp)

    def enable_kretprobe(self, rp: Kretprobe[Any]) -> None:
        """Enable a registered return probe.

        Raises: the errors of enable_kprobe.

        Mirrors: include/linux/kprobes.h:enable_kretprobe (v6.1).
        """
        self.enable_kprobe(rp)

    def disable_kretprobe(self, rp: Kretprobe[Any]) -> None:
        """Disable a registered return probe.

        Raises: the errors of disable_kprobe.

        Mirrors: include/linux/kprobes.h:disable_kretprobe (v6.1).
        """
        self.disable_kprobe(rp)

    def register_kretprobes(self, rps: Sequence[Kretprobe[Any]]) -> None:
        """Register return probes in order. If one cannot be registered, unregister the probes before it.

        Raises: the errors of register_kretprobe, and KernelError EINVAL (an empty sequence).

        Mirrors: kernel/kprobes.c:register_kretprobes (v6.1).
        """
        with self._control():
            register_all(rps, self.kretprobes.register_kretprobe, self.kretprobes.unregister_kretprobe)

    def unregister_kretprobes(self, rps: Iterable[Kretprobe[Any]]) -> None:
        """Unregister return probes in order.

        Raises: the errors of unregister_kretprobe.

        Mirrors: kernel/kprobes.c:unregister_kretprobes (v6.1).
        """
        for rp in rps:
            self.unregister_kretprobe(rp)

    def register_fprobe(self, fp: Fprobe[RegsT]) -> None:
        """Register a probe on the entries and exits of all functions that match its filter.

        The filter matches functions of loaded modules, too. If several functions have a matching name, all of
        them are probed. When a module is unloaded, the fprobe is removed from the module's functions.

        Raises: KernelError EINVAL (no function matches, registered already, code that cannot be assembled),
        EOPNOTSUPP (the kernel has no fentry sites, or a handler uses a register that is not saved), ENOMEM.

        Mirrors: kernel/trace/fprobe.c:register_fprobe (v6.1).
        """
        with self._control():
            self.fprobes.register_fprobe(fp)

    def unregister_fprobe(self, fp: Fprobe[Any]) -> None:
        """Unregister an fprobe. The exit handler is not called for calls that are still running.

        Raises: KernelError EINVAL (not registered).
        Mirrors: kernel/trace/fprobe.c:unregister_fprobe (v6.1).
        """
        with self._control():
            self.fprobes.unregister_fprobe(fp)

    def enable_fprobe(self, fp: Fprobe[Any]) -> None:
        """Enable a registered fprobe again: from now on, its handlers are called at hits.

        Raises: KernelError EDEADLK (in a handler).

        Mirrors: include/linux/fprobe.h:enable_fprobe (v6.1).
        """
        with self._control():
            self.fprobes.enable_fprobe(fp)

    def disable_fprobe(self, fp: Fprobe[Any]) -> None:
        """Disable a registered fprobe: its handlers are not called until it is enabled again.

        Raises: KernelError EDEADLK (in a handler).

        Mirrors: include/linux/fprobe.h:disable_fprobe (v6.1).
        """
        with self._control():
            self.fprobes.disable_fprobe(fp)

    @property
    def jprobes(self) -> Jprobes:
        """The registry of jprobes.

        Raises: KernelError EOPNOTSUPP (the profile's kernel has no jprobes).
        """
        with self._locked():
            jprobes = self.components.engine.jprobes
        if jprobes is None:
            raise KernelError(errno.EOPNOTSUPP, f"{self.kprobes.profile.name} has no jprobes")
        return jprobes

    def register_jprobe(self, jprobe: Jprobe) -> None:
        """Register a jprobe.

        Raises: the errors of register_kprobe, and KernelError EINVAL (not the entry of a function), EEXIST
        (the function has a jprobe), EOPNOTSUPP (the profile's kernel has no jprobes).

        Mirrors: kernel/kprobes.c:register_jprobe (v4.14).
        """
        with self._control():
            self.jprobes.register_jprobe(jprobe)

    def unregister_jprobe(self, jprobe: Jprobe) -> None:
        """Disarm and forget a jprobe.

        Raises: KernelError EOPNOTSUPP (the profile's kernel has no jprobes).

        Mirrors: kernel/kprobes.c:unregister_jprobe (v4.14).
        """
        with self._control():
            self.jprobes.unregister_jprobe(jprobe)

    def enable_jprobe(self, jprobe: Jprobe) -> None:
        """Enable a registered jprobe.

        Raises: the errors of enable_kprobe.

        Mirrors: include/linux/kprobes.h:enable_jprobe (v4.14).
        """
        self.enable_kprobe(jprobe.kp)

    def disable_jprobe(self, jprobe: Jprobe) -> None:
        """Disable a registered jprobe.

        Raises: the errors of disable_kprobe.

        Mirrors: include/linux/kprobes.h:disable_jprobe (v4.14).
        """
        self.disable_kprobe(jprobe.kp)

    def register_jprobes(self, jprobes: Sequence[Jprobe]) -> None:
        """Register jprobes in order. If one cannot be registered, unregister the jprobes before it.

        Raises: the errors of register_jprobe, and KernelError EINVAL (an empty sequence).

        Mirrors: kernel/kprobes.c:register_jprobes (v4.14).
        """
        with self._control():
            register_all(jprobes, self.jprobes.register_jprobe, self.jprobes.unregister_jprobe)

    def unregister_jprobes(self, jprobes: Iterable[Jprobe]) -> None:
        """Unregister jprobes in order.

        Raises: the errors of unregister_jprobe.

        Mirrors: kernel/kprobes.c:unregister_jprobes (v4.14).
        """
        for jprobe in jprobes:
            self.unregister_jprobe(jprobe)

    def hit_ring(self, *registers: str, capacity: int = 128) -> HitRing:
        """Return a ring in guest memory, in which the ring's probes record their latest hits without a trap.

        HitRing.probe(), return_probe() and fprobe() create these probes. `registers` are names as in
        pt_regs. `capacity` is the number of hits kept for each CPU.
        Raises: ValueError (an unknown register, or a capacity that is no power of 2), KernelError ENOMEM.
        """
        with self._control():
            return HitRing(self.machine, self.arch, registers, capacity)

    # How hits are handled

    def _check_registered(self, kprobe: Kprobe[Any]) -> None:
        """Raise KernelError EINVAL if a probe is not registered."""
        if self.kprobes.table.valid(kprobe) is None:
            raise KernelError(errno.EINVAL, "the probe isn't registered: register it first")

    def wait_for_kprobe_optimizer(self) -> None:
        """Optimize and unoptimize all queued kprobes now, instead of some jiffies later.

        Deviates: a kprobe stays queued if a task's stack or instruction pointer is in the bytes to be
        replaced, because the guest is stopped and the task cannot leave them. probe_mode() then still shows a
        breakpoint. Nothing happens if the profile's kernel has no optimizer.

        Raises: KernelError EDEADLK (in a handler).

        Mirrors: kernel/kprobes.c:wait_for_kprobe_optimizer (v6.1).
        """
        with self._control():
            if self.kprobes.optimizer is not None:
                self.kprobes.optimizer.flush()

    def allow_optimization(self, allowed: bool) -> None:
        """Allow or forbid optimization for all kprobes, as sysctl debug.kprobes-optimization does.

        If `allowed` is True, optimize the kprobes that can be optimized, otherwise unoptimize all kprobes.

        Raises: KernelError EOPNOTSUPP (the profile's kernel has no optimizer).

        Mirrors: kernel/kprobes.c:proc_kprobes_optimization_handler (v6.1).
        """
        with self._control():
            self.kprobes.set_optimization(allowed)

    def set_optimized(self, kprobe: Kprobe[Any], wanted: bool) -> None:
        """Request the optimization of a probe's address; if `wanted` is False, keep the address unoptimized.

        This concerns all probes at the address. After a call with False, the address stays unoptimized until
        a call with True. False has no effect at an address without a detour.

        Raises: KernelError EINVAL (not registered), EOPNOTSUPP (no jump is possible; the message says why).
        """
        with self._control():
            self.kprobes.set_optimized(kprobe, wanted)

    def probe_mode(self, kprobe: Kprobe[Any]) -> str:
        """Return the mode in which hits of a registered probe are handled now.

        The modes are "int3", "boosted", "optimized", "ftrace", "disarmed" and "gone".

        Raises: KernelError EINVAL (not registered).
        """
        with self._locked():
            self._check_registered(kprobe)
            return self.kprobes.mode(kprobe)

    def probe_reason(self, kprobe: Kprobe[Any]) -> str:
        """Return the rule that keeps a registered probe from a better mode, with the address concerned.

        Return "" if there is no better mode. If the probe has a jump that Linux would refuse, return the
        tactics that made the jump possible, and Linux's rule.

        Raises: KernelError EINVAL (not registered).
        """
        with self._locked():
            self._check_registered(kprobe)
            return self.kprobes.reason(kprobe)

    def optimized_region(self, addr: int) -> range:
        """Return the addresses of the whole instructions that the jump of a probe at `addr` would replace.

        Raises: KernelError EOPNOTSUPP (no jump is possible; the message names the rule), or the errno that
        register_kprobe would raise for this address.
        """
        with self._locked():
            checker = self.kprobes.probe_checker
            refused = checker.may_probe(addr)
            if refused is not None:
                raise KernelError(refused.errno, refused.text)
            region = checker.optimized_region(addr)
            if isinstance(region, Rejection):
                raise KernelError(errno.EOPNOTSUPP, region.text)
            return range(region.addr, region.end)

    def read_detour(self, kprobe: Kprobe[Any]) -> str:
        """Return the disassembly of the code that hits of a registered probe run out of line.

        Depending on the mode, this is the detour buffer, the insn slot, the ftrace trampoline, or a compiled
        handler. A line that ends in a colon names a part. Each other line is an instruction: address, bytes,
        mnemonic and operands.

        Raises: KernelError EINVAL (not registered).
        """
        with self._locked():
            self._check_registered(kprobe)
            return self._probe_text.out_of_line(kprobe)

    # Text, symbols, memory and clock: handlers may call these

    def read_text(self, addr: int, size: int) -> bytes:
        """Return `size` bytes of text as they are now, with breakpoints and jumps.

        Raises: MemoryFault (not mapped).
        """
        with self._locked():
            return self.machine.text.current(addr, size)

    def read_original_text(self, addr: int, size: int) -> bytes:
        """Return `size` bytes of text as they are without probes.

        Raises: MemoryFault (not mapped).
        """
        with self._locked():
            return self.machine.text.original(addr, size)

    def patched_addresses(self) -> list[int]:
        """Return the addresses of all bytes of text that differ from the original, in ascending order."""
        with self._locked():
            return sorted(self.machine.text.ledger)

    def disassemble(self, addr: int, size: int) -> str:
        """Return the disassembly of text as it is now, one line for each instruction.

        Raises: MemoryFault (not mapped).
        """
        with self._locked():
            return self._probe_text.disassembly(addr, size)

    def kallsyms_lookup_name(self, name: str) -> int:
        """Return the address of a symbol of the kernel or of a loaded module.

        Deviates: Linux returns 0 for an unknown symbol.

        Raises: KernelError ENOENT (no such symbol).

        Mirrors: kernel/kallsyms.c:kallsyms_lookup_name (v6.1).
        """
        with self._locked():
            address = self.live.kallsyms.lookup_name(name)
        if address is None:
            raise KernelError(errno.ENOENT, f"no symbol named {name}")
        return address

    def sprint_symbol(self, addr: int) -> str:
        """Return an address as `name+0xoffset/0xsize [module]`, or in hexadecimal if it is in no symbol.

        Mirrors: kernel/kallsyms.c:sprint_symbol (v6.1).
        """
        with self._locked():
            return sprint_symbol(self.tracing.symbols, addr)

    def read_memory(self, addr: int, size: int) -> bytes:
        """Return `size` bytes of guest memory from the virtual address `addr`.

        Raises: MemoryFault (an address is not mapped).
        """
        with self._locked():
            return self.machine.memory.read(addr, size)

    def write_memory(self, addr: int, data: bytes) -> None:
        """Write `data` to guest memory at the virtual address `addr`: all bytes, or none if it fails.

        Raises: MemoryFault (an address is not mapped or is read-only; kernel text is read-only).
        """
        with self._locked():
            self.machine.memory.write(addr, data)

    def read_cstring(self, addr: int, limit: int = PAGE_SIZE) -> bytes:
        """Return the bytes of the string at the virtual address `addr`, without its NUL.

        At most `limit` bytes are read. Raises: MemoryFault (an address is not mapped).
        """
        with self._locked():
            return self.machine.memory.read_cstring(addr, limit)

    def ktime_get_ns(self) -> int:
        """Read the guest's clock and return the nanoseconds since boot.

        Each call advances a virtual clock.

        Mirrors: include/linux/timekeeping.h:ktime_get_ns (v6.1).
        """
        with self._locked():
            return self.machine.clock.read_ns()

    def regs_return_value(self, regs: Regs) -> int:
        """Return a function's result, an unsigned word, from the registers at the function's return.

        Mirrors: arch/x86/include/asm/ptrace.h:regs_return_value (v6.1).
        """
        self._check_open()
        return int(getattr(regs, self.arch.registers.return_value))

    # The guest

    def call(self, function: str, *args: int | str | bytes) -> int:
        """Call a guest function in the guest's worker task, and return the function's raw result.

        Strings are passed by address. The result is an unsigned word: on a 64-bit guest, -EBADF is 2**64 - 9.
        If the number of parameters is unknown, missing arguments are 0.

        Raises: KernelError ENOENT (no such symbol), EINVAL (not a function, too few arguments, a string with
        NUL), E2BIG (too many arguments), EFAULT (the function oopsed, looped or does not return; see
        messages()), EIO (the guest was dead before). If handlers of probes raised exceptions, the first of
        these is raised.
        """
        with self._request():
            return self.kprobes.hits.failures.reraise_failures(
                lambda: self.guest.call_function(function, *args)
            )

    @property
    def is_dead(self) -> bool:
        """Whether the guest accepts no more calls, because it panicked or was declared dead."""
        with self._locked():
            return self.guest.is_dead

    def messages(self) -> list[Message]:
        """Return the kernel log, oldest message first."""
        with self._locked():
            return self.guest.messages()

    def printk(self, message: str) -> None:
        """Write a line to the kernel log; nothing happens if the guest is dead.

        Raises: KernelError EDEADLK (in a handler).

        Mirrors: kernel/printk/printk.c:_printk (v6.1).
        """
        with self._control():
            self.guest.log(message)

    def load_module(self, name: str) -> None:
        """Load a module that comes with the image, and the modules that it needs.

        If `name` contains a slash, it is the path of a module file.

        Raises: KernelError ENOENT (no such module, or an unresolved symbol), EINVAL (not a regular file),
        EFBIG (the file is too large), ENOEXEC (not a module for this kernel), EEXIST (`name` is a path, and
        its module is loaded already), ENOMEM, the errno that the init function returned, EFAULT (the init
        function was killed).
        """
        self._check_open()
        # Without the lock: this process itself may have to serve the file.
        files = self.modules.read(name)
        with self._request():
            self.modules.load(files)

    def unload_module(self, name: str) -> None:
        """Unload a module. Probes in its text get the mode "gone".

        Raises: KernelError ENOENT (not loaded), EWOULDBLOCK (in use), EBUSY (its init function has not
        returned, or it cannot be unloaded), EFAULT (its exit function was killed).

        Mirrors: kernel/module/main.c:delete_module (v6.1).
        """
        with self._request():
            self.modules.unload(name)

    def loaded_modules(self) -> list[ModuleInfo]:
        """Return the loaded modules, newest first, except those whose data the guest has damaged."""
        with self._control():
            return self.modules.loaded()

    # Files

    @cached_property
    def _control_files(self) -> NodeTree:
        """The tree of control files that read_file() and write_file() use."""
        return self.filesystem()

    @contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[OpenFile]:
        """Open a control file as root, and release the file at the end of the `with` block.

        `flags` are those of open(2). The caller holds the lock.
        """
        opened = self._control_files.open(path, flags, _ROOT)
        try:
            yield opened
        finally:
            self._control_files.release(opened)

    def read_file(self, path: str) -> str:
        """Return the text of a control file, for example "tracing/trace" or "kprobes/list".

        Paths are relative to the root of a mount. Bytes that are not UTF-8 become surrogates.

        Deviates: no task of the guest opens the file, so the read makes no system calls that probes could
        see. To hit a probe, call a guest function, load a module, or use a mount. Files in scratch/ belong to
        the guest; only a mount gives access to them.

        Raises: KernelError ENOENT (no such file), EISDIR, EAGAIN (a pipe is empty), the errno with which the
        file refuses the read.
        """
        data = b""
        with self._request(), self._opened(path, os.O_RDONLY) as opened:
            try:
                while part := opened.read(_READ_SIZE, len(data)):
                    data += part
            except WouldBlock:
                if not data:
                    raise KernelError(errno.EAGAIN, f"{path}: there is nothing to read yet") from None
        return data.decode("utf-8", "surrogateescape")

    def write_file(self, path: str, text: str) -> None:
        """Write to a control file without truncating it, as `echo TEXT >> PATH` does.

            kernel.write_file("tracing/kprobe_events", "p:reads vfs_read count=$arg3")

        Deviates: no task of the guest opens the file, so the write makes no system calls that probes could
        see.

        Raises: KernelError ENOENT (no such file), EISDIR, EAGAIN (the file takes no data now), ENOSPC (it
        takes only a part of the text), the errno with which the file refuses the text; see tracing/error_log.
        """
        left = text.encode("utf-8", "surrogateescape")
        # Without the lock: this process itself may have to serve the host's files that the text names.
        prepared = self._prepared(path, left)
        with self._request(), self._opened(path, os.O_WRONLY | os.O_APPEND) as opened:
            # Some files take one word at a time.
            while left:
                try:
                    taken = finish(opened.begin_write(left, 0, prepared))
                except WouldBlock:
                    raise KernelError(errno.EAGAIN, f"{path}: it takes no data now; try again") from None
                if not taken:
                    raise KernelError(errno.ENOSPC, f"{path}: the file does not take {len(left)} bytes")
                left = left[taken:]

    def _prepared(self, path: str, data: bytes) -> Callable[[], Steps] | None:
        """Read the host files that a write of `data` names, and return a function that begins the write.

        Return None if the file at `path` does not read host files.
        """
        with self._control():
            node = self._control_files.lookup(path)
        return node.prepare(_ROOT, data) if isinstance(node, HostReadingFile) else None

    def filesystem(
        self,
        layout: RootLayout = RootLayout.FULL,
        owner: Owner | None = None,
        further: Mapping[str, Node] = MappingProxyType({}),
    ) -> NodeTree:
        """Return the files of this kernel as a tree that belongs to `owner`, by default root.

        `layout` selects the content of the root directory. `further` maps name -> file, for additional files
        of machine/. Files in `further` replace files of kprobefs with the same name.

        Raises: KernelError ENODEV (closed).
        """
        with self._locked():
            return build_filesystem(self.components, layout, owner, further)

    def mount(self, layout: RootLayout = RootLayout.FULL, owner: Owner | None = None) -> Mount:
        """Return a mount for a front end (a server) to serve.

        Requests to the mount also make the guest do system calls.

        `layout` and `owner`: see filesystem(). Raises: KernelError ENODEV (closed).
        """
        return self.mounted(self.filesystem(layout, owner))

    def mounted(self, files: NodeTree) -> Mount:
        """Return a mount that shows `files`, a tree that filesystem() returned.

        Raises: KernelError ENODEV (closed).
        """
        with self._locked():
            mount = self._mounts.add(files)
        mount.has_native_traps = self.machine.hooks.is_native
        return mount

    def replace_kernel(self, old: Kernel, define: Callable[[], Iterable[None]]) -> Iterator[None]:
        """Return an iterator whose steps take over the time and the trace records of `old`.

        `old` is a kernel with the same lock and configuration. `define` registers the probes and events of
        `old` in this kernel, and returns an iterable that does this in steps. Each of these steps is one step
        of the result. Between two steps, `old` stays usable, and the caller may release the lock. When the
        iterator is exhausted, `old` is unusable. If a step fails, `old` stays usable.

        The lock must be held. Events that `define` registers get the ids of the events of `old` with the same
        names. So the old records can still be printed. The marker REBOOT_MARK follows the old records.

        Raises: KernelError ENOMEM, and the errors of `define`.
        """
        self._check_open()
        return self.components.replace_kernel(old.components, define)

    def adopt_mount(self, mount: Mount, files: NodeTree) -> None:
        """Take over `mount` from the kernel that this kernel replaces, and show `files` in the mount.

        Raises: KernelError ENODEV (closed).
        """
        self._check_open()
        self._mounts.adopt_mount(mount, files)

    # The end

    def close(self) -> None:
        """Stop the workloads and free the machine. Closing a closed kernel has no effect.

        Raises: KernelError EDEADLK (in a handler).
        """
        self.lock.end_debugging()
        with self.lock:
            if self._is_closed:
                return
            if self.machine.is_running:
                raise KernelError(errno.EDEADLK, "close(): a handler runs; close the kernel after the call")
            self._is_closed = True
            self.loads.stop()
            self.machine.close()

    def __enter__(self) -> Self:
        """Return this kernel, which the end of the `with` block closes."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close the kernel."""
        self.close()
