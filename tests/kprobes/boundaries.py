"""All instruction boundaries of an image, and the rules by which probes on some of them are refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from iced_x86 import Decoder, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind, Register

from emulated_kernel.image.builtin_image import KernelImage, load_image
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.util.errors import KernelError

_RAISING = (Mnemonic.DIV, Mnemonic.IDIV, Mnemonic.UD2)
INDIRECT = (FlowControl.INDIRECT_CALL, FlowControl.INDIRECT_BRANCH)


@dataclass(frozen=True)
class Operand:
    """Memory that an instruction reads or writes: base + index * scale + displacement."""

    base: str
    index: str
    scale: int
    displacement: int

    def address(self, regs: RegisterSet, mask: int) -> int:
        base, index = (getattr(regs, name) if name else 0 for name in (self.base, self.index))
        return int(base + index * self.scale + self.displacement) & mask


@dataclass(frozen=True)
class Boundary:
    """An instruction of the kernel's text, from a decoder that is independent of kprobefs."""

    addr: int
    size: int
    function: str
    refusal: str | None
    """The rule that forbids a probe here; None if a probe is possible."""
    repeats: bool
    hides_trap: bool
    """Whether a single step has another effect than execution.

    pushf stores the trap flag, and pause suppresses the trap.
    """
    operands: tuple[Operand, ...] = ()
    raises: bool = False
    """Whether the instruction can raise an exception that few others can: a division or an undefined one."""


_NAMES = {value: name.lower() for name, value in vars(Register).items() if isinstance(value, int)}


def _name(register: int) -> str:
    """Return the name that RegisterSet has for the iced-x86 register `register`.

    Return "" if there is no register, and for rip, because the displacement includes rip already.
    """
    name = _NAMES[register]
    return "" if name in ("none", "rip") else name if name[1].isdigit() else name[1:]


def _operands(insn: Instruction) -> tuple[Operand, ...]:
    used = InstructionInfoFactory().info(insn).used_memory()
    return tuple(
        Operand(_name(m.base), _name(m.index), m.scale, m.displacement)
        for m in used
        if m.segment not in (Register.GS, Register.FS)
    )


ERRNOS = {
    "blacklisted": errno.EINVAL,
    "jump label": errno.EINVAL,
    "BUG() site": errno.EINVAL,
    "breakpoint": errno.EINVAL,
    "indirect branch through memory": errno.EOPNOTSUPP,
}
"""Rule -> errno of register_kprobe."""


def refusal(insn: Instruction, blacklisted: bool, is_label: bool, is_bug: bool) -> str | None:
    """Return the first rule that forbids a probe, in the order of Linux's checks, or None."""
    if blacklisted:
        return "blacklisted"
    if is_label:
        return "jump label"
    if is_bug:
        return "BUG() site"
    if insn.mnemonic == Mnemonic.INT3:
        return "breakpoint"
    if insn.flow_control in INDIRECT and insn.op0_kind == OpKind.MEMORY:
        return "indirect branch through memory"
    return None


def all_boundaries(image: KernelImage) -> list[Boundary]:
    """Return all instruction boundaries of the core text, function by function."""
    return _boundaries(image.path, image.arch)


@cache
def _boundaries(path: Path, arch: str) -> list[Boundary]:
    """Return the boundaries of an image file; the result is cached, because it takes half a second."""
    return list(_walk(load_image(path, arch)))


def _walk(image: KernelImage) -> Iterator[Boundary]:
    (text,) = image.text_ranges
    forbidden = [(start, end) for start, end, _ in image.blacklist]
    bugs = set(image.bugs)
    labels = {label.code for label in image.jump_labels}
    bits = 32 if image.arch == "i386" else 64
    at = text.start
    while at < text.end:
        where = image.kallsyms.lookup(at)
        end = min(where.symbol.address + where.symbol.size, text.end)
        # The part foo.cold may be probed if the function foo may.
        whole = image.kallsyms.lookup_name(where.name.partition(".")[0])
        is_forbidden = any(start <= whole < stop for start, stop in forbidden) if whole else False
        near = [(start, stop) for start, stop in forbidden if start < end and at < stop]
        for insn in Decoder(bits, image.read(at, end - at), ip=at):
            blacklisted = is_forbidden or any(start <= insn.ip < stop for start, stop in near)
            yield Boundary(
                insn.ip,
                insn.len,
                where.symbol.name,
                refusal(insn, blacklisted, insn.ip in labels, insn.ip in bugs),
                repeats=insn.has_rep_prefix or insn.has_repne_prefix,
                hides_trap=insn.mnemonic in (Mnemonic.PUSHFQ, Mnemonic.PUSHFD, Mnemonic.PAUSE),
                operands=_operands(insn),
                raises=insn.mnemonic in _RAISING,
            )
        at = end


def verdict(kprobes: Kprobes, addr: int) -> int:
    """Register and unregister a probe; return 0 or the errno of the registration."""
    kprobe = Kprobe(addr=addr, disabled=True)
    try:
        kprobes.register_kprobe(kprobe)
    except KernelError as error:
        return error.errno or -1
    kprobes.unregister_kprobe(kprobe)
    return 0
