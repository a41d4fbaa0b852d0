"""Instructions that the kernel image does not have, probed and unprobed: each emulated form, and copies of
rip-relative instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from types import SimpleNamespace

import pytest

from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.image.kallsyms import Kallsyms, Symbol
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.control_lock import ControlLock
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.scripted import ScriptedGracePeriod
from tests.kprobes.states import TF, build_arena, generate, image_and_arena
from tests.kprobes.transparency import Stepper, differences
from tests.machine import guests
from tests.machine.guests import CODE

STATES = 60

INSTRUCTIONS = {
    "cli": "fa",
    "sti": "fb",
    "pushf": "9c",
    "pushf, 16 bits": "66 9c",
    "popf": "9d",
    "popf, 16 bits": "66 9d",
    "ret": "c3",
    "ret 0x10": "c2 10 00",
    "rep ret": "f3 c3",
    "call": "e8 20 00 00 00",
    "call back": "e8 e0 ff ff ff",
    "jmp": "eb 10",
    "jmp, 32 bits": "e9 20 00 00 00",
    **{f"j{condition:x}, 8 bits": f"{0x70 + condition:02x} 10" for condition in range(16)},
    **{f"j{condition:x}, 32 bits": f"0f {0x80 + condition:02x} 10 00 00 00" for condition in range(16)},
    "loopne": "e0 10",
    "loope": "e1 10",
    "loop": "e2 10",
    "loop on ecx": "67 e2 10",
    "jrcxz": "e3 10",
    "jecxz": "67 e3 10",
    "call rax": "ff d0",
    "call rsp": "ff d4",
    "call r11": "41 ff d3",
    "jmp rdx": "ff e2",
    "jmp r8": "41 ff e0",
    "push rsp": "54",
    "pop rsp": "5c",
    "pop [rsp]": "8f 04 24",
    "enter": "c8 20 00 00",
    "leave": "c9",
    "xlat": "d7",
    "cmpxchg16b": "48 0f c7 0f",
    "mov [rip+data]": "48 8b 05 f9 3f 00 00",
    "mov [rip+data], imm32": "c7 05 f6 3f 00 00 78 56 34 12",
    "lea [rip]": "48 8d 05 00 00 00 00",
    "cmp [rip+data], imm8": "80 3d f9 3f 00 00 07",
    "div": "48 f7 f1",
    "bt [mem], reg": "48 0f a3 07",
    "shld": "48 0f a5 c2",
    "rcl": "48 d3 d0",
    "daz mov to memory": "48 a3 00 50 00 81 ff ff ff ff",
    "repe cmpsb": "f3 a6",
    "repne scasb": "f2 ae",
    "lodsq": "48 ad",
    "ud2": "0f 0b",
}
"""Name -> code in hexadecimal."""

SHOW_TRAP_FLAG = ("pushf", "pushf, 16 bits")
LOAD_TRAP_FLAG = ("popf", "popf, 16 bits")


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = guests.boot("ret")
    guests.booted.remove(machine)
    yield machine
    machine.close()


def _kprobes(machine: Machine, code: bytes) -> Kprobes:
    """Write `code` to the start of the machine's text, and return a probe engine for this machine."""
    padded = code.ljust(64, b"\x90")
    machine.text.disown(guests.TEXT)
    machine.text.poke(CODE, padded)
    machine.text.adopt(guests.TEXT, machine.text.current(guests.TEXT, 0x4000))
    image = SimpleNamespace(
        kallsyms=Kallsyms([Symbol("f", CODE, "t")], CODE, CODE + 64),
        text_ranges=[(CODE, CODE + 64)],
        blacklist=[],
        bugs=[],
        ex_table=[],
        mcount=[],
        jump_labels=[],
        static_calls=[],
        data=[],
        read=machine.text.original,
        arch="x86_64",
    )
    kprobes = Kprobes(machine, image, X86_64(), print, ScriptedGracePeriod(), ControlLock(), BREAKPOINTS)
    machine.on_leave.append(kprobes.hits.ctlblk.abandon)
    return kprobes


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_probe_is_not_noticed(machine: Machine, name: str) -> None:
    code = bytes.fromhex(INSTRUCTIONS[name])
    kprobes = _kprobes(machine, code)
    rng = Random(name)
    arena = build_arena(machine, rng)
    stepper = Stepper(machine, image_and_arena(machine, arena))
    repeats = code[0] in (0xF2, 0xF3)
    starts = [generate(arena, rng, CODE, repeats=repeats) for _ in range(STATES)]
    if name in SHOW_TRAP_FLAG:
        unprobed = [stepper.up_to(start, CODE + len(code)) for start in starts]
    else:
        unprobed = [stepper.unprobed(start) for start in starts]
    unprobed = [
        effect.without_trap_flag() if effect.fault or name not in LOAD_TRAP_FLAG else effect
        for effect in unprobed
    ]
    probe = stepper.probe(CODE)
    kprobes.register_kprobe(probe)
    probed = [stepper.probed(start) for start in starts]
    kprobes.unregister_kprobe(probe)
    found = [differences(a, b) for a, b in zip(unprobed, probed, strict=True)]
    assert [(hex(s.flags), hex(s.sp), d) for s, d in zip(starts, found, strict=True) if d] == []
    assert kprobes.hits.may_interrupt()


EMULATED = tuple(INSTRUCTIONS)[: tuple(INSTRUCTIONS).index("push rsp")]
REX_W = 0x48
FAR_RETURNS = {"lret": "cb", "lret, 64 bits": "48 cb", "lret 8, 64 bits": "48 ca 08 00"}
BY_PYTHON = ("pushf, 16 bits", "popf, 16 bits", "call rsp")
"""Emulated instructions that Python executes at each hit; no compiler makes them."""


@pytest.mark.parametrize("name", [*EMULATED, *FAR_RETURNS])
def test_an_emulated_instruction_follows_the_handler(machine: Machine, name: str) -> None:
    """A hit of an emulated instruction is one trap without Python, and has the same effect as the instruction
    on the processor.

    Instructions in BY_PYTHON get no stub in guest code.
    """
    code = bytes.fromhex({**INSTRUCTIONS, **FAR_RETURNS}[name])
    kprobes = _kprobes(machine, code)
    rng = Random(name)
    arena = build_arena(machine, rng)
    starts = [generate(arena, rng, CODE) for _ in range(STATES)]
    if name in FAR_RETURNS:
        starts = [_far_returning(machine, start, code) if rng.random() < 0.5 else start for start in starts]
    stepper = Stepper(machine, image_and_arena(machine, arena))
    if name in SHOW_TRAP_FLAG:
        unprobed = [stepper.up_to(start, CODE + len(code)) for start in starts]
    else:
        unprobed = [stepper.unprobed(start) for start in starts]
    unprobed = [
        effect.without_trap_flag() if effect.fault or name not in LOAD_TRAP_FLAG else effect
        for effect in unprobed
    ]
    probe = Kprobe(addr=CODE, pre_handler=lambda *_: None, program=lambda _builder, _way: True)
    kprobes.register_kprobe(probe)
    head = kprobes.table.valid(probe)
    assert head is not None
    assert head.insn is not None
    assert kprobes.routes.compile_stub(head)
    assert head.insn.slot is None
    assert head.stub is not None
    assert (head.stub.region is None) is (name in BY_PYTHON)
    if name in BY_PYTHON:
        return
    native = machine.hooks.native_traps
    probed = [stepper.led_to(start, effect) for start, effect in zip(starts, unprobed, strict=True)]
    assert machine.hooks.native_traps - native == STATES or not machine.hooks.is_native
    kprobes.unregister_kprobe(probe)
    found = [differences(a, b) for a, b in zip(unprobed, probed, strict=True)]
    assert [(hex(s.flags), hex(s.sp), d) for s, d in zip(starts, found, strict=True) if d] == []
    if name.startswith("lret") and code[0] == REX_W:
        assert len({effect.fault is None for effect in unprobed}) == 2
    if name == "popf":
        flags = [effect.end.flags & TF for effect in unprobed if effect.fault is None]
        assert len(set(flags)) == 2


def _far_returning(machine: Machine, start: RegisterSet, code: bytes) -> RegisterSet:
    """Store a return address in the kernel's code segment at the stack pointer, and return the state."""
    size = 8 if code[0] == REX_W else 4
    target = (CODE + 40).to_bytes(8, "little")[:size]
    with suppress(MemoryFault):
        machine.memory.write(start.sp, target + machine.regs.cs.to_bytes(size, "little"))
    return start
