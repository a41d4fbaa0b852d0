"""Tiny hand-assembled kernels: a boot stub, an interrupt handler and the code of a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from keystone import KS_ARCH_X86, KS_MODE_64, Ks

from emulated_kernel.machine.cpu_parts import cpu_parts
from emulated_kernel.machine.machine import Machine
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.config import MachineConfig

LAYOUT = cpu_parts("x86_64").model.layout
TEXT = 0xFFFFFFFF81000000
RODATA = TEXT + 0x4000
DATA = TEXT + 0x5000
STACK_TOP = DATA + 0x3000
CLOCK = DATA + 0x100
CR2 = DATA + 0x110
LOG = DATA + 0x200
"""Address of the handler's log of 8-byte words {vector, error code, ip, cr2}; the count is at DATA."""
CODE = TEXT + 0x1000
"""Address of the code of tests."""

BOOT = f"""
    movabs rsp, {STACK_TOP:#x}
    mov eax, 5
    hlt
"""
# The handler logs the frame, skips [DATA+8] bytes at the interrupted ip, and returns without iretq.
HANDLER = f"""
    push rax
    push rbx
    push rcx
    movabs rbx, {DATA:#x}
    mov rax, [rbx]
    shl rax, 5
    mov rcx, [rsp+24]
    mov [rbx+rax+0x200], rcx
    mov rcx, [rsp+32]
    mov [rbx+rax+0x208], rcx
    mov rcx, [rsp+48]
    mov [rbx+rax+0x210], rcx
    mov rcx, [rbx+0x110]
    mov [rbx+rax+0x218], rcx
    inc qword ptr [rbx]
    mov rcx, [rbx+8]
    add [rsp+48], rcx
    pop rcx
    pop rbx
    pop rax
    lea rsp, [rsp+16]
    popfq
    ret
"""

booted: list[Machine] = []
"""Machines that are closed after the test."""
_assembler = Ks(KS_ARCH_X86, KS_MODE_64)


def asm(source: str, address: int = CODE) -> bytes:
    """Return the machine code of assembly in Intel syntax."""
    code, _ = _assembler.asm(source, address)
    return bytes(code)


@dataclass
class FakeSymbols:
    """A stand-in for Kallsyms that looks up the addresses in `names`."""

    names: dict[str, int]

    def lookup_name(self, name: str) -> int | None:
        return self.names.get(name)


@dataclass
class FakeImage:
    """A stand-in for a kernel image, with 16 KiB of text, a page of rodata and 16 KiB of data."""

    code: bytes = b""
    handler: str | None = HANDLER
    arch: str = "x86_64"
    entry: int = TEXT
    abi: dict[str, int] = field(default_factory=lambda: {"percpu.base": DATA, "percpu.host_cr2": CR2 - DATA})
    ex_table: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = bytearray(b"\xcc" * 0x4000)
        boot = asm(BOOT, TEXT)
        text[: len(boot)] = boot
        names = {"host_clock": CLOCK}
        if self.handler is not None:
            handler = asm(self.handler, TEXT + 0x100)
            text[0x100 : 0x100 + len(handler)] = handler
            names["asm_host_interrupt"] = TEXT + 0x100
        text[0x1000 : 0x1000 + len(self.code)] = self.code
        self.kallsyms = FakeSymbols(names)
        self.segments = [
            (TEXT, bytes(text), 0x4000, Prot.READ | Prot.EXEC),
            (RODATA, b"read-only".ljust(0x1000, b"\0"), 0x1000, Prot.READ),
            (DATA, b"", 0x4000, Prot.READ | Prot.WRITE),
        ]


def boot(source: str = "", **options: object) -> Machine:
    """Return a machine with the code `source` at CODE, where the next run begins.

    `options`: attributes of MachineConfig, and `handler` and `ex_table` of FakeImage.
    """
    image_options = {k: options.pop(k) for k in ("handler", "ex_table") if k in options}
    machine = Machine(MachineConfig(**options), FakeImage(asm(source) if source else b"", **image_options))
    machine.regs.ip = CODE
    booted.append(machine)
    return machine


def exceptions(machine: Machine) -> list[tuple[int, int, int, int]]:
    """Return (vector, error code, ip, cr2) of each exception that the guest's handler has logged."""
    memory = machine.memory
    count = memory.read_u64(DATA)
    return [tuple(memory.read_u64(LOG + 32 * i + 8 * k) for k in range(4)) for i in range(count)]
