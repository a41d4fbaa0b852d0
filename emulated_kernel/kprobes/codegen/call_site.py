"""Guest code that, at a function's entry, gets the function's address and its return address."""

from __future__ import annotations

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import Arithmetic, ComputeImmediate, GetRegister, Load
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder


def get_called(builder: ProgramBuilder, arch: Arch, register: int) -> None:
    """Emit code that gets the address of the function whose fentry site made the call.

    `register`: number of the virtual register that receives the address.
    """
    called_by = arch.handler_call_link or arch.call_link
    if called_by is not None:
        builder.emit(GetRegister(register, called_by))
    else:
        builder.emit(
            GetRegister(register, arch.registers.sp),
            Load(register, register, 0, arch.word_size),
        )
    builder.emit(ComputeImmediate(Arithmetic.ADD, register, -arch.call_size))


def get_return_address(
    builder: ProgramBuilder, arch: Arch, way: EntryKind, register: int, slot: int | None = None
) -> None:
    """Emit code at a function's entry that gets the function's return address.

    `register`: number of the virtual register that receives the return address. `way`: how the hit has
    entered the code.
    `slot`: number of a virtual register that receives the address of the stack slot with the return address,
    or the stack pointer if the return address is in a register. None: neither is needed.
    """
    if slot is not None:
        builder.emit(GetRegister(slot, arch.registers.sp))
    if arch.registers.link is not None:
        builder.emit(GetRegister(register, arch.registers.link))
        return
    base = register if slot is None else slot
    if slot is None:
        builder.emit(GetRegister(base, arch.registers.sp))
    if way is EntryKind.CALL:
        builder.emit(ComputeImmediate(Arithmetic.ADD, base, arch.word_size))
    # The call has just written to this address, so the load cannot fault.
    builder.emit(Load(register, base, 0, arch.word_size))
