"""Traps that machines redirect without Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.native import host_code
from emulated_kernel.util.config import MachineConfig
from tests.machine.guests import CODE, boot
from tests.machine.native.host_cpu import NEEDS_ROUTINE, TF

pytestmark = NEEDS_ROUTINE


def unexpected(_regs: Regs) -> None:
    raise AssertionError("Python got the trap")


@pytest.fixture(params=["x86_64", "i386", "riscv64", "riscv64i"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    image = load_image(arch=request.param)
    with Machine(MachineConfig(arch=request.param), image) as machine:
        yield machine


def counted_loop(machine: Machine, turns: int) -> tuple[int, int, int]:
    """Write a loop with a breakpoint and an instruction that the breakpoint's handler must skip.

    Return the addresses of the breakpoint, of the instruction after the skipped one, and of the whole code.
    """
    text = machine.text
    code = text.alloc_text(64)
    if machine.model.trap_flag:
        # mov ecx, turns; int3; hlt; dec ecx; jnz int3; ret
        dec = b"\xff\xc9"
        body = b"\xb9" + turns.to_bytes(4, "little") + b"\xcc\xf4" + dec + b"\x75\xfa\xc3"
        text.poke(code, body)
        return code + 5, code + 7, code
    # lui a1, turns >> 12; ebreak; wfi; addi a1, a1, -1; bnez a1, ebreak; ret
    assert turns % 4096 == 0
    parts = (turns | 0x5B7, 0x00100073, 0x10500073, 0xFFF58593, 0xFE059AE3, 0x00008067)
    text.poke(code, b"".join(part.to_bytes(4, "little") for part in parts))
    return code + 4, code + 12, code


def test_a_million_redirected_traps_need_no_python(machine: Machine) -> None:
    turns = 1 << 20
    site, behind, code = counted_loop(machine, turns)
    machine.breakpoints[site] = Redirect(behind, unexpected)
    assert machine.hooks.is_native
    before = machine.hooks.native_traps
    machine.call(code)
    assert machine.hooks.native_traps - before == turns


def test_python_gets_the_traps_that_it_must_get(machine: Machine) -> None:
    site, behind, code = counted_loop(machine, 4096)
    met = 0

    def handler(regs: Regs) -> None:
        nonlocal met
        met += 1
        regs.ip = behind
        if met == 1000:
            machine.hooks.python[0] = 0
        if met == 2000:
            machine.breakpoints[site] = Redirect(behind, unexpected)

    route = Redirect(behind, handler)
    machine.breakpoints[site] = route
    machine.hooks.python[0] = 1
    before = machine.hooks.native_traps
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (1000, 3096)
    machine.breakpoints[site] = handler
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (2000, 3096 + 3096)
    machine.breakpoints[site] = route
    machine.hooks.set_guest_caller(machine, True)
    met = 3000
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (3000 + 4096, 3096 + 3096)
    machine.hooks.set_guest_caller(machine, False)
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (3000 + 4096, 3096 + 3096 + 4096)


def test_a_step_by_the_trap_flag() -> None:
    """A redirected debug trap clears the trap flag, except after a round of a repeated string instruction."""
    machine = boot(
        "mov ecx, 5; mov rdi, rsp; nop; pushf; or byte ptr [rsp + 1], 1; popf; rep stosb; hlt; mov bl, 7; hlt"
    )
    text = machine.text.current(CODE, 40)
    rep = CODE + text.index(b"\xf3")
    end = rep + 2
    machine.debug_traps[rep] = Redirect(rep, unexpected)
    machine.debug_traps[end] = Redirect(end + 1, unexpected)
    machine.regs.sp -= 256
    machine.run()
    assert (machine.regs.bx & 0xFF, machine.regs.cx, machine.regs.flags & TF) == (7, 0, 0)
    assert machine.hooks.native_traps == 5


@pytest.mark.parametrize("why", ["another kind of host", "the environment"])
def test_a_host_without_a_routine(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "the environment":
        monkeypatch.setenv(host_code.PYTHON_TRAPS, "1")
    else:
        monkeypatch.setattr(host_code, "ROUTINES", {})
    machine = boot("int3; hlt; mov ebx, 7; hlt")
    assert not machine.hooks.is_native
    met: list[int] = []

    def handler(regs: Regs) -> None:
        met.append(regs.ip)
        regs.ip = CODE + 2

    machine.breakpoints[CODE] = Redirect(CODE + 2, handler)
    machine.run()
    assert (met, machine.regs.bx, machine.hooks.native_traps) == ([CODE + 1], 7, 0)


def test_slow_registers_leave_traps_to_python() -> None:
    machine = boot("int3; hlt; mov ebx, 7; hlt", fast_registers=False)
    assert not machine.hooks.is_native
    machine.breakpoints[CODE] = Redirect(CODE + 2, lambda regs: regs.set("ip", CODE + 2))
    machine.run()
    assert (machine.regs.bx, machine.hooks.native_traps) == (7, 0)
