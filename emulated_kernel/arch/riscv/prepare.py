"""From the probed instruction to its out-of-line form: a copy for a slot, or an emulation."""

from __future__ import annotations

from enum import Enum, auto
from errno import EINVAL

from emulated_kernel.arch.base import Prepared
from emulated_kernel.arch.riscv.emulate import RiscvEmulation, is_emulated
from emulated_kernel.arch.riscv.insn import RiscvInsn, RiscvOpcode, decode_insn
from emulated_kernel.errors import KernelError

_REJECTED = (RiscvOpcode.SYSTEM, RiscvOpcode.MISC_MEM)


class Handling(Enum):
    """What a probe does with an instruction. Mirrors: decode-insn.h:enum probe_insn (v6.1)."""

    REJECTED = auto()
    SIMULATED = auto()
    """INSN_GOOD_NO_SLOT."""
    COPIED = auto()
    """INSN_GOOD."""


def handling(insn: RiscvInsn) -> Handling:
    """How an instruction is run out of line.

    Deviates: v6.1 refuses the compressed jumps and branches, which v6.6 simulates; and it takes c.addiw for
    the c.jal of 32 bits, and refuses it too.
    Mirrors: arch/riscv/kernel/probes/decode-insn.c:riscv_probe_decode_insn (v6.6).
    """
    if insn.opcode in _REJECTED:
        return Handling.REJECTED
    return Handling.SIMULATED if is_emulated(insn) else Handling.COPIED


def prepare(code: bytes, addr: int, breakpoint_: bytes, *, compressed: bool) -> Prepared:
    """Out-of-line form of the instruction at `addr`.

    Raises: KernelError(EINVAL) for system instructions and fences.
    Mirrors: arch/riscv/kernel/probes/kprobes.c:arch_prepare_kprobe, arch_prepare_ss_slot (v6.1).
    """
    insn = decode_insn(code, compressed=compressed)
    found = handling(insn)
    if found is Handling.REJECTED:
        raise KernelError(EINVAL, "system instruction or fence")
    emulation = RiscvEmulation(addr + insn.length, addr, insn) if found is Handling.SIMULATED else None
    return Prepared(
        length=insn.length,
        slot_bytes=code[: insn.length] + breakpoint_,
        boostable=False,
        emulate=emulation,
    )
