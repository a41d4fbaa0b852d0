"""TrapHooks: the callbacks that Unicorn calls at traps, which dispatch the traps to their handlers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import FastRegs, Regs
from emulated_kernel.machine.interrupts.exceptions import ExceptionState
from emulated_kernel.machine.interrupts.trap_handlers import TrapHandler, TrapHandlers
from emulated_kernel.machine.native.entry_words import KernelEntry
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.native.trap_words import TrapTable, TrapWords
from emulated_kernel.machine.run_watchdog import HandlerTime
from emulated_kernel.machine.traps.trap import Trap
from emulated_kernel.machine.unicorn_engine import (
    HOOK_INSN_INVALID,
    HOOK_INTR,
    INSN_INVALID_CALLBACK,
    INTR_CALLBACK,
    Engine,
)
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.fast_dataclass import replace

_REPORTS = {HOOK_INTR: "intr", HOOK_INSN_INVALID: "invalid"}
"""Kind of Unicorn's hook -> suffix of the host's routines charge_SUFFIX and handler_SUFFIX.

The hook can call these routines, which add the time of a trap.
"""
_NO_VECTOR = (1 << 64) - 1
"""No exception's number: with this value, a field such as TrapWords.arrival_vector matches no exception."""


class TrapHooks:
    """Dispatches int3 to `breakpoints` and debug traps to `debug_traps`.

    All other exceptions are passed as a Trap to `fault_hooks`, then to `dispatch`.

    If the host can run the machine-code routine of `machine.native`, Unicorn calls the routine instead of the
    Python callback. The routine follows Redirects (handlers that make the guest continue at another address),
    except while the guest runs within a hit that Python handles. For all other traps, the routine calls the
    Python callback.

    ctypes would only print a Python exception raised in a callback, and the guest would continue. Therefore
    the exception is stored, and `check` raises it after the run.
    """

    family: ClassVar[str] = "x86"
    """Family of guest architectures; it selects the host's routine for traps, in `machine.native`."""
    reported_ahead: ClassVar[int] = 0
    """Number of bytes from an exception's instruction to the instruction pointer that Unicorn reports."""

    def __init__(
        self, engine: Engine, cpu: CpuModel, regs: Regs, state: ExceptionState, handler_time: HandlerTime
    ) -> None:
        self.engine = engine
        self.handler_time = handler_time
        self.cpu = cpu
        self.regs = regs
        self.state = state
        self.breakpoints = TrapHandlers()
        self.debug_traps = TrapHandlers()
        self.protection_faults: dict[int, TrapHandler] = {}
        """Address of an instruction that raises #GP on purpose -> handler."""
        self.fault_hooks: list[Callable[[Trap, Regs], bool]] = []
        """Functions called for each exception, including int3 without a handler, before the guest gets it.

        A function returns True if it has handled the exception.
        """
        self.dispatch: Callable[[Trap], None] = self.stop
        """Function to call with an exception that no breakpoint handler and no fault hook handled."""
        self.call_from_user: Callable[[], bool] = lambda: False
        """Function that handles system calls of user mode on arm64 and riscv64 without a Trap.

        It is called first at each system call. It returns True if it has handled the call. It returns False,
        with nothing changed, if the instruction is not in user mode.
        """
        self.guest_callers: set[object] = set()
        """Objects whose handlers call guest functions.

        While the set has members, every handler runs only after its trap has interrupted the run, since
        Unicorn isn't re-entrant. Only `set_guest_caller` changes the set.
        """
        self.words = TrapWords()
        """Host memory that the host's routine for traps reads."""
        self.python = _word(self.words, "python")
        """View of the field `python` of `words`.

        The field is 1 while the guest runs within a hit that Python handles, else 0. While the field is 1,
        Python gets all traps.
        """
        self._hooks: dict[int, ctypes.c_void_p] = {}
        """Kind of a Unicorn hook, such as HOOK_INTR -> handle of the hook that calls the host's routine."""
        self._native: int | None = None
        """Kind of the hook that calls the host's routine for traps; None if the host has no such routine."""
        self.arrivals = _word(self.words, "arrivals")
        """View of the field `arrivals` of `words`: the number of runs ended because of end_runs_at()."""
        self._arrival: tuple[int, int] | None = None
        """Address of the host's routine that ends runs, and the number of the exception at which it does so.

        None before end_runs_at(), or if the host has no such routine.
        """
        self._entry: tuple[KernelEntry, int] | None = None
        """Arguments `entry` and `vector` of enter_calls().

        None before that call, or if the host has no routine for it.
        """
        self._deferred: Callable[[Regs], object] | None = None
        self.stopped_by: Trap | None = None
        self._hook_traps()

    def _hook_traps(self) -> None:
        self._hook_natively(HOOK_INTR, INTR_CALLBACK(self._make_interrupt_callback()))
        self.engine.add_hook(HOOK_INSN_INVALID, INSN_INVALID_CALLBACK(self._make_invalid_callback()))

    def _hook_natively(self, kind: int, callback: Any) -> None:
        """Make Unicorn call the host's routine for traps from the hook `kind`, such as HOOK_INTR.

        The routine calls the Python function `callback` for the traps that it does not handle. If the host
        has no routine, Unicorn calls `callback` for all traps.
        """
        regs = self.regs
        engine = self.engine
        routine = routine_address(self.family) if isinstance(regs, FastRegs) else None
        if routine is None:
            engine.add_hook(kind, callback)
            return
        assert isinstance(regs, FastRegs)
        words = self.words
        words.ip = regs.address_of("ip")
        words.flags = regs.address_of("_stored_flags") if self.cpu.trap_flag else 0
        words.callback = ctypes.cast(callback, ctypes.c_void_p).value
        words.handler = words.callback
        words.routine = routine
        words.beyond = routine
        self._native = kind
        self._call_natively(kind, routine, callback)
        self.breakpoints.use(TrapTable(words.breakpoints), regs.address_of)
        self.debug_traps.use(TrapTable(words.debug_traps))

    def _call_natively(self, kind: int, routine: int, *keep: object) -> None:
        """Add a hook of the kind `kind` by which Unicorn calls the host's code at the address `routine`.

        `keep`: objects that must exist as long as the hook.
        """
        words = self.words
        data = ctypes.addressof(words)
        old = self._hooks.pop(kind, None)
        if old is not None:
            self.engine.remove_hook(old)
        hook = self.engine.add_hook(kind, ctypes.c_void_p(routine), data=data, keep=(words, *keep))
        self._hooks[kind] = hook

    def end_runs_at(self, address: int, vector: int, in_flight: int = 0) -> None:
        """From now on, let the host's routine end the run when exception `vector` is raised at `address`.

        Each such end adds 1 to `arrivals`. Python still gets these exceptions if the host has no routine, and
        while charge() is in effect. `in_flight`: address of Unicorn's mark that an exception is in flight, or
        0; only x86 needs the mark.
        """
        routine = routine_address("arrive")
        if routine is None or not isinstance(self.regs, FastRegs):
            return
        words = self.words
        words.ip = self.regs.address_of("ip")
        words.arrival = address + self.reported_ahead
        words.arrival_ip = address
        words.arrival_vector = vector
        words.in_flight = in_flight
        words.emu_stop = self.engine.stop_address
        self._arrival = routine, vector
        self._call_natively(HOOK_INTR, routine)

    def enter_calls(self, vector: int, entry: KernelEntry) -> None:
        """From now on, let the host's routine enter the guest's kernel at each system call, without Python.

        `vector`: number of the exception of system calls. `entry`: table of what the routine checks first,
        and of the moves of data by which it then enters the kernel. The caller must have called
        end_runs_at(). Python still gets the exception if a check fails, if the host has no routine, and while
        charge() is in effect.
        """
        routine = routine_address("enter")
        if routine is None or self._arrival is None:
            return
        words = self.words
        words.entry_vector = vector
        entry.show(words)
        words.refused = words.beyond
        words.beyond = routine
        self._entry = entry, vector

    def charge(self, time: int, trap_ns: int, handler_ns: int) -> None:
        """Add nanoseconds to the u64 at address `time` of this process at each trap from now on.

        A trap adds `trap_ns`, and if Python handles it, `handler_ns` in addition. The guest must not run, and
        the host must have routines.
        """
        assert self._native is not None
        kind = self._native
        words = self.words
        words.arrival_vector = _NO_VECTOR
        words.entry_vector = _NO_VECTOR
        words.time = time
        words.trap_ns = trap_ns
        words.handler_ns = handler_ns
        charging = routine_address(f"charge_{_REPORTS[kind]}")
        handler = routine_address(f"handler_{_REPORTS[kind]}")
        assert charging is not None
        self._call_natively(kind, charging)
        words.callback = handler

    def stop_charging(self) -> None:
        """Undo charge(): no longer add time at each trap."""
        assert self._native is not None
        words = self.words
        self._call_natively(self._native, words.routine)
        words.callback = words.handler
        if self._arrival is not None:
            routine, words.arrival_vector = self._arrival
            self._call_natively(HOOK_INTR, routine)
        if self._entry is not None:
            _, words.entry_vector = self._entry

    def _charge_callback(self) -> None:
        """Add the time of one trap and of its handler, if charge() is in effect.

        This is for traps that Unicorn reports to Python without the host's routine.
        """
        words = self.words
        if self._charges:
            ctypes.c_uint64.from_address(words.time).value += words.trap_ns + words.handler_ns

    def take_back_charge(self) -> None:
        """Subtract the time that the current trap has added, if charge() is in effect.

        The host calls this if it executes, for the guest, an instruction that does not trap on a real CPU.
        """
        words = self.words
        if self._charges:
            ctypes.c_uint64.from_address(words.time).value -= words.trap_ns + words.handler_ns

    @property
    def _charges(self) -> bool:
        return bool(self.words.callback != self.words.handler)

    @property
    def is_native(self) -> bool:
        """Whether the machine-code routine of `machine.native`, and not Python, handles Redirects at traps.

        The value is False if the host cannot run the routine. It does not change while Python temporarily
        gets all traps.
        """
        return bool(self.words.callback)

    @property
    def native_traps(self) -> int:
        """Number of traps after which the guest continued without Python."""
        return int(self.words.hits)

    def set_guest_caller(self, owner: object, calls: bool) -> None:
        """Add `owner` to `guest_callers` if `calls` is True, otherwise remove it.

        `calls`: whether handlers of the object `owner` call guest functions. While the set has a member,
        Python gets all traps.
        """
        (self.guest_callers.add if calls else self.guest_callers.discard)(owner)
        self.words.callers = len(self.guest_callers)

    def run(self, address: int) -> int:
        """Run the guest from `address` on until it halts or is stopped; return Unicorn's error code."""
        error = self.engine.start(address)
        while self._deferred is not None and self._goes_on(self._deferred):
            error = self.engine.start(self.regs.ip)
        return error

    def defer(self, handler: Callable[[Regs], object]) -> None:
        """Interrupt the run, and make run() call `handler` afterwards, since Unicorn isn't re-entrant."""
        self._deferred = handler
        self.engine.stop()

    def _goes_on(self, handler: Callable[[Regs], object]) -> bool:
        """Call the deferred handler `handler`; return True if the run must continue, False if it ends."""
        self._deferred = None
        try:
            if self.handler_time.is_measured:
                self.handler_time.measure(handler, self.regs)
            else:
                handler(self.regs)
        except BaseException as error:
            self._park(error)
        return self.stopped_by is None and self.engine.parked is None

    def stop(self, trap: Trap) -> None:
        """End the run and report `trap` as the reason."""
        self.stopped_by = trap
        self.end_run()

    def end_run(self) -> None:
        """End the run at the current instruction."""
        self.engine.stop()

    def check(self) -> None:
        """Raise the exception that a callback raised during the run, if any."""
        engine = self.engine
        if engine.parked is not None:
            parked = engine.parked
            engine.parked = None
            raise parked

    def _park(self, error: BaseException) -> None:
        self.engine.parked = error
        self.end_run()

    def _make_interrupt_callback(self) -> Callable[..., object]:
        """Return the callback for interrupts.

        The callback is a closure, because each look-up of an attribute would slow down hits.
        """
        find = self.breakpoints.find
        regs = self.regs
        guest_callers = self.guest_callers
        handler_time = self.handler_time
        breakpoint_vector = int(Vector.BREAKPOINT)

        def interrupt(engine: int, vector: int, data: int) -> None:
            if handler_time.is_measured:
                handler_time.measure(interrupt, engine, vector, data)
                return
            try:
                if vector == breakpoint_vector and not guest_callers:
                    handler = find(regs.ip - 1)
                    if handler is not None:
                        handler(regs)
                        return
                self._interrupted(vector)
            except BaseException as error:
                self._park(error)

        handler_time.callbacks.add(interrupt.__code__)
        return interrupt

    def _interrupted(self, vector: int) -> None:
        """Dispatch a trap that the fast path of the callback doesn't handle."""
        ip = self.regs.ip
        handler = None
        if vector == Vector.BREAKPOINT:
            handler = self.breakpoints.find(ip - 1)
        elif vector == Vector.DEBUG:
            handler = self.debug_traps.find(ip)
        elif vector == Vector.GENERAL_PROTECTION:
            handler = self.protection_faults.get(ip)
            if handler is not None:
                self.state.take()
        if handler is None:
            self._exception(vector)
        elif self.guest_callers:
            self.defer(handler)
        else:
            handler(self.regs)

    def _make_invalid_callback(self) -> Callable[..., object]:
        return self._guarded(lambda _data: self._exception(Vector.INVALID_OPCODE))

    def _guarded(self, handle: Callable[[int], None]) -> Callable[..., object]:
        """Return a callback for Unicorn that calls `handle` and stores an exception that `handle` raises.

        The callback is for rare events. `handle` gets the second argument that Unicorn passes, such as the
        number of the interrupt.
        """
        handler_time = self.handler_time

        def callback(*args: int) -> bool:
            if handler_time.is_measured:
                handler_time.measure(callback, *args)
                return True
            try:
                self._charge_callback()
                handle(args[1])
            except BaseException as error:
                self._park(error)
            return True

        handler_time.callbacks.add(callback.__code__)
        return callback

    def _exception(self, vector: int) -> None:
        error_code = self.state.take()
        trap = self.cpu.exception(self.engine, self.regs.ip, vector, error_code)
        self.regs.ip = trap.address
        self.raise_exception(trap)

    def raise_exception(self, trap: Trap) -> None:
        """Pass an exception to the fault hooks, and then to the guest; only callbacks may call this."""
        regs = self.regs
        for hook in self.fault_hooks:
            if hook(trap, regs):
                return
        if regs.ip != trap.address:
            # A hook moved the fault from an insn slot to the original instruction.
            trap = replace(trap, address=regs.ip)
        self.dispatch(trap)


def _word(words: TrapWords, name: str) -> memoryview:
    """Return a view of the field `name` of `words`. Writing the view is faster than setting the field."""
    at = getattr(TrapWords, name).offset // 8
    return memoryview(words).cast("B").cast("Q")[at : at + 1]
