"""The assembler of handlers produces the instructions that were written, or refuses the text and reports
where and why.
"""

from __future__ import annotations

from typing import Any

import capstone
import pytest

from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.program.asm_source import Assembly, SourceText
from emulated_kernel.util.errors import KernelError

X86, RISCV = ("x86_64", "i386"), ("riscv64", "riscv64i")
PLACE = 0x1C48
MODES: dict[str, tuple[int, int]] = {
    "x86_64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
    "i386": (capstone.CS_ARCH_X86, capstone.CS_MODE_32),
    "riscv64": (capstone.CS_ARCH_RISCV, capstone.CS_MODE_RISCV64),
    "riscv64i": (capstone.CS_ARCH_RISCV, capstone.CS_MODE_RISCV64),
}


def assembled(arch: str, text: str, place: int = PLACE) -> Assembly:
    assembler, source = arch_named(arch).assembler, SourceText.parse(text)
    names = assembler.cells(source)
    return assembler.assemble(source, {name: place + 8 * number for number, name in enumerate(names)})


def listing(arch: str, made: Assembly) -> str:
    engine: Any = capstone.Cs(*MODES[arch])
    return "; ".join(f"{name} {rest}".strip() for _, _, name, rest in engine.disasm_lite(made.code, 0))


WRITTEN = {
    "x86_64": {
        "inc qword ptr [counter]": "inc qword ptr gs:[0x1c48]",
        "add [a], rdi; sub [b + 4], esi": "add qword ptr gs:[0x1c48], rdi; sub dword ptr gs:[0x1c54], esi",
        "mov eax, [a]": "movabs eax, dword ptr gs:[0x1c48]",
        "MOV EAX, 10 # ten": "mov eax, 0xa",
        "mov eax, [rdi + 16]\n// nothing\n\tadd eax, 0b11": "mov eax, dword ptr [rdi + 0x10]; add eax, 3",
        "test edi, edi; jz out; inc byte ptr [a+7]; out:": (
            "test edi, edi; je 0xc; inc byte ptr gs:[0x1c4f]"
        ),
        "again: dec ecx; jnz again": "dec ecx; jne 0",
        "mov ecx, [4096]": "mov ecx, dword ptr [0x1000]",
        "mov rcx, [4096]; mov r15, [a]": "mov rcx, qword ptr [0x1000]; mov r15, qword ptr gs:[0x1c48]",
        "mov ecx, [rdi - 8 + rbp*4 + 24]": "mov ecx, dword ptr [rdi + rbp*4 + 0x10]",
        "lea rax, [rdi*8 - 129]": "lea rax, [rdi*8 - 0x81]",
    },
    "i386": {
        "add dword ptr [a], 1; adc dword ptr [a+4], 0": (
            "add dword ptr fs:[0x1c48], 1; adc dword ptr fs:[0x1c4c], 0"
        ),
        "again: dec ecx; jnz again": "dec ecx; jne 0",
        "mov ecx, [4096]": "mov ecx, dword ptr [0x1000]",
    },
    "riscv64": {
        "ld t0, a": "lui t0, 2; add t0, t0, gp; ld t0, -0x3b8(t0)",
        "sd a0, a, t1": "lui t1, 2; add t1, t1, gp; sd a0, -0x3b8(t1)",
        "la t1, a+4": "lui t1, 2; addiw t1, t1, -0x3b4; add t1, t1, gp",
        "mv t0, a0; snez t1, t0; sext.w t2, t1": "mv t0, a0; snez t1, t0; sext.w t2, t1",
        "again: addi t0, t0, -1; bgtz t0, again; j again": "addi t0, t0, -1; bgtz t0, -4; j -8",
        "bnez a0, out; amoadd.d zero, t0, (t1); out:": "bnez a0, 8; amoadd.d zero, t0, (t1)",
        "li t0, 0x80000000": "addi t0, zero, 1; slli t0, t0, 0x1f",
        "ble t0, t1, e; bgtu t0, t1, e; e:": "bge t1, t0, 8; bltu t1, t0, 4",
        "mulhu s2, x5, fp; remw t6, a7, zero; sraiw t0, t0, 31": (
            "mulhu s2, t0, s0; remw t6, a7, zero; sraiw t0, t0, 0x1f"
        ),
        "ld\tt0,8(a0)": "ld t0, 8(a0)",
        "lbu t0, -1(a0); sh t0, (a1)": "lbu t0, -1(a0); sh t0, 0(a1)",
    },
}


@pytest.mark.parametrize(
    ("arch", "text"), [(arch, text) for arch, texts in WRITTEN.items() for text in texts]
)
def test_what_was_written_is_what_is_made(arch: str, text: str) -> None:
    assert listing(arch, assembled(arch, text)) == WRITTEN[arch][text]


def test_a_near_cell_on_riscv_takes_one_instruction() -> None:
    made = assembled("riscv64", "ld t0, a; sd t0, a, t1", 0x100)
    assert listing("riscv64", made) == "ld t0, 0x100(gp); sd t0, 0x100(gp)"


@pytest.mark.parametrize(
    ("arch", "text", "reads", "writes", "flags"),
    [
        ("x86_64", "mul rdi", "ax di", "ax dx", True),
        ("x86_64", "mov al, 5", "ax", "ax", False),
        ("x86_64", "xor eax, eax", "", "ax", True),
        ("x86_64", "rep movsb", "si di cx", "si di cx", False),
        ("x86_64", "lea r9, [r8 + rbp*4]", "r8 bp", "r9", False),
        ("i386", "cmpxchg [a], ecx", "ax cx", "ax", True),
        ("i386", "cdq; idiv ecx", "ax cx", "ax dx", True),
        ("x86_64", "mov ecx, 1; jz out; mov edx, 1; out: add rcx, rdx", "dx", "cx dx", True),
        ("riscv64", "add t0, a0, tp; sd s1, 8(t0)", "a0 tp s1", "t0", False),
        ("riscv64", "li t0, 1; beqz a0, out; li t1, 1; out: add t0, t0, t1", "a0 t1", "t0 t1", False),
        ("riscv64", "lw zero, 4(a5)", "a5", "", False),
    ],
)
def test_registers_are_found(arch: str, text: str, reads: str, writes: str, flags: bool) -> None:
    made = assembled(arch, text)
    assert (made.reads, made.writes) == (set(reads.split()), set(writes.split()))
    assert made.writes_flags is flags


REFUSED = {
    X86: {
        "nop; mov eax, [ecx": "line 1, column 6: 'mov eax, [ecx': brackets that don't match",
        "nop\n  foo eax": "line 2, column 3: 'foo eax': keystone: Invalid mnemonic",
        "add eax, counter": "keystone: Cannot find a symbol",
        "a: nop; a: nop": "there is a label a already",
        "mov al, 300": "300 doesn't fit",
        "add eax, 0x123456789": "",
        "mov byte ptr [a], -129": "-129 doesn't fit",
        "mov eax, [a + 5]": "a cell has 8 bytes",
        "mov eax, [a - 1]": "a cell has 8 bytes",
        "mov eax, [a * 2]": "a is no register",
        "mov eax, [ecx + a]": "a is no register",
        "lea eax, [a]": "take its contents",
        "jmp away": "keystone: Cannot find a symbol",
        "nop; jmp 0x100000": "jumps lead to labels of the text",
        "call away": "",
        "ret": "the stack pointer",
        "mov eax, [esp + 4]": "the stack pointer",
        "push eax": "",
        "mov esp, eax": "the stack pointer",
        "hlt": "is privileged",
        "cli": "is privileged",
        "in al, dx": "is privileged",
        ".byte 0xf4": "is privileged",
        ".byte 0x90, 0x90": "isn't one instruction",
        "int3": "leaves the handler",
        "std": "a flag that isn't one of results",
        "mov gs, ax": "changes what a handler has no copy of",
        "fld1": "general registers",
        "addps xmm0, xmm1": "general registers",
        "rdtsc": "general registers",
        "jmp ecx": "",
    },
    ("i386",): {
        "nop; inc qword ptr [a]": "column 6: 'inc qword ptr [a]': qword ptr: the instruction has 4 bytes",
        "mov QWORD PTR [a], 5": "QWORD PTR: the instruction has 4 bytes",
        "shl qword ptr [ecx], 1": "has 4 bytes",
        "bt qword ptr [a], 3": "has 4 bytes",
        "neg mmword ptr [a]": "has 4 bytes",
        "test qword ptr [a + 0], 1": "has 4 bytes",
        "cmpxchg16b xmmword ptr [ecx]": "has 8 bytes",
    },
    ("x86_64",): {
        "mov rax, [rdi + 0x100000008]": "doesn't fit",
        "mov [rdi*8 + 0x180000008], rax": "doesn't fit",
        "mov rax, [rdi + 0x80000000]": "doesn't fit",
    },
    RISCV: {
        "nop; add t0, t1": "line 1, column 6: 'add t0, t1': add has 3 operands",
        "nop\n\n  add t0, t1, a9": "line 3, column 3: 'add t0, t1, a9': 'a9' is no register",
        "addi t0, t0, 2048": "2048 doesn't fit: from -2048 to 2047",
        "slliw t0, t0, 32": "32 doesn't fit",
        "ld t0, a+1": "a cell has 8 bytes",
        "sd t0, a": "sd has 3 operands",
        "sd t0, a, t0": "the third register",
        "ld zero, a": "needs a register",
        "la t0, 5": "la takes a cell",
        "ld t0, 8(sp)": "the stack pointer",
        "addi sp, sp, -16": "the stack pointer",
        "li gp, 0": "gp leads to the CPU's own data",
        "mv ra, a0": "another probe's to change",
        "mv tp, a0": "tp is the task",
        "j away": "there is no label away",
        "a: nop; a: nop": "there is a label a already",
        "ret": "no instruction that a handler may have",
        "ecall": "no instruction that a handler may have",
        "csrw sstatus, t0": "no instruction that a handler may have",
        "fadd.d f0, f1, f2": "no instruction that a handler may have",
        "amoadd.d t0, t0, 8(t1)": "no offset",
        "beqz t0": "beqz has 2 operands",
        "li t0, x": "'x' is no number",
        "bnez t0, far" + "; nop" * 1024 + "; far:": "jumps reach 4 KiB",
    },
}


@pytest.mark.parametrize(
    ("arch", "text", "why"),
    [(arch, text, why) for archs, texts in REFUSED.items() for arch in archs for text, why in texts.items()],
)
def test_what_is_refused_says_where_and_why(arch: str, text: str, why: str) -> None:
    with pytest.raises(KernelError) as raised:
        assembled(arch, text)
    assert raised.value.name == "EINVAL"
    assert "code, line " in str(raised.value)
    assert why in str(raised.value)
