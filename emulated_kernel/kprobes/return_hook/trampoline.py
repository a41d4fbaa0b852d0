"""Trampoline: the code to which hooked functions return instead of to their callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.codegen.pt_regs import PtRegsFrames
from emulated_kernel.kprobes.profile import TrampolineForm
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.probed_machine import ProbedMachine

Returned = Callable[[Any, int], int]
"""Function that handles a return; it takes registers and frame (see Pending), and returns the next ip."""


class RunAsmHandlers(Protocol):
    """Function that runs the assembly handlers of the hooked calls that return now, in the guest.

    `frame` is the address of the stack slot whose return address was replaced for these calls.
    """

    def __call__(
        self, regs: Any, frame: int, /, *, in_frame: bool, on_return: Callable[[Any], object]
    ) -> bool:
        """Run the assembly handlers, and call `on_return` when they have ended.

        Return False, without a call of `on_return`, if there are no handlers or no room for their code.
        `in_frame`: the registers are saved in a struct pt_regs at sp; if False, they are the CPU's own.
        """


class Trampoline:
    """The trampoline to which all hooked functions return.

    The code is created for the first hooked function, and is never freed.
    """

    def __init__(
        self,
        machine: ProbedMachine,
        abi: Mapping[str, int],
        arch: Arch,
        form: TrampolineForm,
        returned: Returned,
        run_asm_handlers: RunAsmHandlers,
        place: int | None = None,
    ) -> None:
        """Prepare the trampoline; the guest does not change before install().

        `place`: address of unused bytes of the kernel's text, to which functions return; None: they return to
        memory that the host allocates. See Arch.text_returns.
        """
        self._machine = machine
        self._memory = machine.memory
        self._abi = abi
        self._arch = arch
        self._word = arch.word_size
        self.form = form
        self._returned = returned
        self._run_asm_handlers = run_asm_handlers
        self._frames = PtRegsFrames(machine.memory, arch.pt_regs, arch.word_size)
        self.address = 0
        """Address of the trampoline, which replaces return addresses; 0 before the first hooked function."""
        self.size = 0
        """Size in bytes of the trampoline's code."""
        self.filled_in = 0
        """Address after the trampoline's breakpoint; 0 before install(), and in the form BREAKPOINT.

        While the CPU executes the trampoline from this address on, the stack slot holds the real return
        address, as unwinders need.
        """
        self.native = 0
        """Address to which functions return if a hook has a handler in guest code; 0 if no hook has one."""
        self.native_breakpoint: int | None = None
        """Address of the breakpoint that leads to the native trampoline in the form BREAKPOINT; else None."""
        self.on_install: list[Callable[[], object]] = []
        """Functions to call after the trampoline has been created."""
        self._native_code: CompiledCode | None = None
        self._place = place
        self._is_guest_notified = False
        """Whether the guest knows the trampoline's addresses."""

    def install(self) -> None:
        """Create the trampoline, unless it exists. Raises: HardwareError (no executable memory is left)."""
        if self.address:
            return
        text = self._machine.text
        arch = self._arch
        place = self._place
        is_code = self.form is TrampolineForm.ASSEMBLY
        stub = arch.return_trampoline(0) if is_code and place is None else None
        size = len(arch.breakpoint if stub is None else stub.code)
        if place is None:
            # The memory is filled with breakpoints already.
            address = text.alloc_text(2 * size if stub is None else size)
        else:
            # The bytes before are for the entry of the native trampoline, or for its breakpoint.
            address = place + arch.call_size
            text.replace(place, (arch.call_size + size) // size * arch.breakpoint)
        if stub is None:
            self._machine.breakpoints[address] = self._on_breakpoint
            if not is_code:
                self.native_breakpoint = address + size if place is None else place
        else:
            stub = arch.return_trampoline(address)
            text.poke(address, stub.code)
            self._machine.breakpoints[address + stub.trap] = self._on_saved
            self.filled_in = address + stub.trap + len(arch.breakpoint)
        self.address = address
        self.size = size
        for notify in self.on_install:
            notify()

    def notify_guest(self) -> None:
        """Store the trampoline's address in the guest's variable host_return_trampoline.

        When the guest's unwinder meets this address, it asks the host for the caller. See kernel/rethook.c of
        kprobefs's own kernel.
        """
        self._is_guest_notified = True
        self._write(self._abi["host_return_trampoline"], self.address)
        self._notify_native()

    def _notify_native(self) -> None:
        at = self._abi.get("host_native_return_trampoline")
        if self._is_guest_notified and at is not None:
            self._write(at, self.native)

    def is_one(self, address: int) -> bool:
        """Return True if `address` is one that hooks write in place of a return address."""
        return address != 0 and address in (self.address, self.native)

    def pieces(self) -> Iterator[tuple[int, range]]:
        """Yield (entry address, range of addresses) for each piece of the trampoline's code."""
        code = self._native_code
        if code is not None:
            yield code.entry, range(code.address, code.address + code.size)
        for start in (self.address, self.native_breakpoint):
            if start:
                yield start, range(start, start + self.size)

    def adopt_native(self, code: CompiledCode | None) -> None:
        """Use `code` as the native trampoline, to which hooked functions then return.

        If `code` is None, there is no native trampoline from now on. The code traps to the host if Python
        must handle a return.
        """
        self._native_code = code
        self.native = 0
        if code is not None:
            self.native = self.native_breakpoint or self._entry(code.entry)
            for trap in code.traps:
                self._machine.breakpoints[trap] = self._on_saved
            if self.native == self.native_breakpoint:
                self._machine.breakpoints[self.native] = Redirect(code.entry, _go_to, code.entry)
        self._notify_native()

    @property
    def native_return_address(self) -> int | None:
        """Address to which functions will return after adopt_native(); None if it is the code's entry."""
        return self.native_breakpoint or self._place

    def _entry(self, code: int) -> int:
        """Return the address to which functions return in order to enter the native trampoline at `code`."""
        place = self._place
        if place is None:
            return code
        # While a return is handled, the stack has the address after the entry, which is that for Python.
        assert self._arch.text_returns is not None
        self._machine.text.replace(place, self._arch.text_returns.trampoline_entry(place, code))
        return place

    def replace_return_address(self, regs: Any) -> tuple[int, int]:
        """Replace the return address at a function's entry; return (real address, address of its stack slot).

        If the return address is in a register, sp at the entry takes the place of the slot's address.

        Raises: MemoryFault (the stack is not writable memory).
        """
        link = self._arch.registers.link
        if link is not None:
            address = int(getattr(regs, link))
            setattr(regs, link, self.address)
            return address, int(regs.sp)
        slot = int(regs.sp)
        address = int.from_bytes(self._memory.read(slot, self._word), "little")
        self._write(slot, self.address)
        return address, slot

    def _write(self, slot: int, address: int) -> None:
        self._memory.write(slot, address.to_bytes(self._word, "little"))

    def _on_saved(self, regs: Any) -> None:
        """Handle a return to a trampoline that has saved the registers on the stack.

        Mirrors: arch/x86/kernel/rethook.c:arch_rethook_trampoline_callback (v6.1).
        """
        _, slot, _ = self._saved(regs)
        if not self._run_asm_handlers(regs, slot, in_frame=True, on_return=self._handle_saved):
            self._handle_saved(regs)

    def _saved(self, regs: Any) -> tuple[Any, int, int]:
        """Return the saved registers, the address of the stack slot, and the address of a word after them.

        The trampoline jumps to the content of this word, so the real return address must be written to it.
        """
        saved = self._frames[regs.sp]
        after = regs.sp + len(self._arch.pt_regs) * self._word
        return saved, after if self._arch.registers.link is None else saved.sp, after

    def _handle_saved(self, regs: Any) -> None:
        saved, slot, target = self._saved(regs)
        self._write(target, self._returned(saved, slot))

    def _on_breakpoint(self, regs: Any) -> None:
        """Handle a return to a bare breakpoint, before which no code has saved the registers."""
        slot = self._slot_above(regs)
        if not self._run_asm_handlers(regs, slot, in_frame=False, on_return=self._handle_live):
            self._handle_live(regs)

    def _slot_above(self, regs: Any) -> int:
        return int(regs.sp) if self._arch.registers.link is not None else int(regs.sp) - self._word

    def _handle_live(self, regs: Any) -> None:
        regs.ip = self.address
        regs.ip = self._returned(regs, self._slot_above(regs))


def _go_to(address: int, regs: Any) -> None:
    regs.ip = address
