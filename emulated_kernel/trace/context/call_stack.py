"""CallStack: an unwinder of the guest's call chains, which can start at any instruction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, dropwhile, islice
from typing import Any

from emulated_kernel.arch.analysis.stack_frames import ALIGNED, CFA, IP, Frame, FunctionFrames
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hook_sets import HookSets
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.trace.context.function_frames import FrameTables
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.util.fast_named_tuple import NamedTuple

MAX_CALLERS = 1024
"""Maximum number of addresses in a call chain.

Mirrors: kernel/trace/trace.c:FTRACE_KSTACK_ENTRIES (v6.1).
"""
MAX_FRAMES = 2 * MAX_CALLERS
"""Maximum number of frames that the unwinder follows."""
_RECORDING = ("host_trace_commit", "trace_event_raw_event_", "__traceiter_")
"""Name prefixes of functions that record a static event; a call chain omits them at its start."""


class Caller(NamedTuple):
    """A frame of a call chain: a function that made a call or was interrupted."""

    address: int
    """Address at which the function continues."""
    slot: int
    """Address of the stack slot that holds `address`; the stack pointer if a register holds `address`."""


class _CallSite(NamedTuple):
    """A position in the call chain: the registers and the instruction pointer in one function."""

    regs: Mapping[str, int]
    """Name in pt_regs -> value, for registers whose value is known."""
    ip: int
    is_return_address: bool
    """Whether `ip` is a return address; the call is then the instruction before `ip`.

    If the value is False, `ip` is the next instruction of a function that was interrupted or hit.
    """


class _Left(NamedTuple):
    """Registers and stack after a function has returned to its caller, as the unwinder restores them."""

    regs: Mapping[str, int]
    """Name -> value of known registers; the value of IP is the return address."""
    cfa: int
    """Canonical frame address: the stack pointer after the return."""
    slot: int
    """Address of the stack slot that held the return address."""


class CallStack:
    """Unwinder: finds a function's callers on the stack.

    FrameTables provides the layouts of stack frames.
    """

    def __init__(
        self,
        memory: GuestMemory,
        tables: FrameTables,
        abi: Mapping[str, int],
        symbols: KernelSymbols,
        arch: Arch,
        hook_sets: HookSets,
        kprobes: Kprobes,
    ) -> None:
        self._memory = memory
        self._tables = tables
        self._abi = abi
        self._symbols = symbols
        self._arch = arch
        self._real = hook_sets.real_return_address
        self._kprobes = kprobes
        self._kept = arch.callee_saved | {arch.registers.sp}
        self._registers = tuple(arch.entry_frame(by_interrupt=True).regs)

    def caller(self, regs: Any) -> int:
        """Return the return address of a function. `regs`: registers before its first instruction."""
        link = self._arch.registers.link
        if link is not None:
            return int(getattr(regs, link))
        return self._memory.read_word(getattr(regs, self._arch.registers.sp))

    def callers(self, regs: Any) -> list[int]:
        """Return the call chain: the ip of `regs`, then the callers' return addresses, innermost first.

        Functions that record a static event are omitted at the start of the chain. Linux skips a fixed number
        of frames instead.
        """
        place = getattr(regs, self._arch.registers.ip)
        addresses = chain((place,), (caller.address for caller in self.returns(place, regs)))
        return list(islice(dropwhile(self._is_recording, addresses), MAX_CALLERS))

    def _is_recording(self, address: int) -> bool:
        found = self._symbols.lookup(address)
        return found is not None and found.symbol.name.startswith(_RECORDING)

    def user_callers(self, task: int) -> list[int]:
        """Return a list of one address, where a task left user mode; it is empty for a kernel thread.

        `task`: address of the task_struct.
        Linux: further addresses are found by frame pointers, which the guest's user mode does not have.
        Mirrors: arch/x86/kernel/stacktrace.c:arch_stack_walk_user (v6.1).
        """
        abi = self._abi
        arch = self._arch
        top = self._memory.read_word(task + abi["task_struct.stack"]) + abi["thread.size"]
        below = len(arch.pt_regs) - arch.pt_regs.index(arch.registers.ip)
        ip = self._memory.read_word(top - below * arch.word_size)
        return [ip] if 0 < ip < arch.task_size else []

    def returns(self, ip: int, regs: Any) -> Iterator[Caller]:
        """Yield the callers of the code at `ip`, innermost first; `regs`: values of the other registers.

        Hazard: the guest's stack may have any contents, so the frames may form a circle. The unwinder stops
        after MAX_FRAMES.
        """
        known = ((name, getattr(regs, name, None)) for name in self._registers)
        place = _CallSite({name: value for name, value in known if value is not None}, ip, False)
        with suppress(MemoryFault):
            for _ in range(MAX_FRAMES):
                found = self._step(self._probed(place))
                if found is None:
                    return
                caller, place = found
                yield caller

    def _step(self, place: _CallSite) -> tuple[Caller, _CallSite] | None:
        """Return the caller of the function at `place` and the caller's position; None at the chain's end."""
        address = place.ip - place.is_return_address
        arch = self._arch
        where = self._symbols.lookup(address)
        frames = None if where is None else self._tables.of(where.symbol)
        found = None if frames is None else self._left(frames, place, address)
        if frames is None or found is None or IP not in found.regs:
            return None
        regs = dict(found.regs)
        cfa = found.cfa
        hooked = cfa if arch.registers.link is not None else cfa - arch.word_size
        above = _CallSite(regs, self._real(hooked, regs.pop(IP)), not frames.by_interrupt)
        if above.is_return_address:
            above = above._replace(regs={name: value for name, value in regs.items() if name in self._kept})
        else:
            above = self._probed(above)
        if self._symbols.lookup(above.ip) is None:
            # The host has called this function, so it has no caller in the guest.
            return None
        return Caller(above.ip, found.slot), above

    def _probed(self, place: _CallSite) -> _CallSite:
        """Map a position inside an instruction slot or detour to the position of the probed instruction.

        Return any other position unchanged.
        """
        address = place.ip - place.is_return_address
        if self._symbols.lookup(address) is not None:
            return place
        resolved = self._kprobes.resolve_probed_address(address)
        if resolved is None:
            return place
        if resolved.detour is not None:
            found = self._left(self._tables.of_detour(*resolved.detour), place, address)
            if found is None:
                return place
            place = place._replace(regs=found.regs)
        if resolved.pushed:
            sp = self._arch.registers.sp
            place = place._replace(regs={**place.regs, sp: place.regs[sp] + resolved.pushed})
        return place._replace(ip=resolved.address + place.is_return_address)

    def _left(self, frames: FunctionFrames, place: _CallSite, address: int) -> _Left | None:
        """Return registers and stack as they are after a function has returned; None if they are unknown.

        `frames`: layouts of the function's stack frame. `place`: position in the function. `address`: an
        address in the instruction that the function was executing at `place`, such as a call.
        """
        frame = frames.at(address)
        bases = {} if frame is None else self._bases(frame, place.regs)
        if frame is None or CFA not in bases:
            return None
        regs, slot = self._restored(frame, bases, place.regs)
        regs[self._arch.registers.sp] = bases[CFA]
        return _Left(regs, bases[CFA], slot)

    def _bases(self, frame: Frame, regs: Mapping[str, int]) -> dict[str, int]:
        found = {
            base: regs[name] - offset & self._arch.mask
            for name, (base, offset) in frame.regs.items()
            if base in (CFA, ALIGNED) and name in regs
        }
        if CFA not in found and ALIGNED in found:
            for (base, at), (kept, offset) in frame.slots.items():
                if base == ALIGNED and kept == CFA:
                    found[CFA] = self._memory.read_word(found[ALIGNED] + at) - offset & self._arch.mask
        return found

    def _restored(
        self, frame: Frame, bases: Mapping[str, int], regs: Mapping[str, int]
    ) -> tuple[dict[str, int], int]:
        """Return the registers after the function's return, and the slot with the return address.

        The slot is given by its address; it is the stack pointer if a register holds the return address.
        `bases`: base of stack slots (CFA or ALIGNED) -> its address. `regs`: values of the registers that are
        known. If both a stack slot and a register hold a saved value, the slot has priority, because code may
        have changed the value in the slot. If several slots hold a register, the lowest slot has priority.
        """
        found: dict[str, int] = {}
        slot = regs.get(self._arch.registers.sp, 0)
        for (base, at), (kept, offset) in sorted(frame.slots.items(), key=_by_place):
            if not offset and kept not in (CFA, ALIGNED) and kept not in found and base in bases:
                found[kept] = self._memory.read_word(bases[base] + at)
                if kept == IP:
                    slot = bases[base] + at
        for name, (kept, offset) in frame.regs.items():
            if not offset and kept not in (CFA, ALIGNED) and name in regs:
                found.setdefault(kept, regs[name])
        return found, slot


def _by_place(kept: tuple[tuple[str, int], tuple[str, int]]) -> tuple[bool, int]:
    (base, at), _ = kept
    return base != CFA, at
