"""Events of return probes: guest code writes the same records as Python."""

from __future__ import annotations

from random import Random

import pytest

from emulated_kernel.arch.program.ir_builder import EntryKind
from tests.trace.compiled.guest import TARGETS, Guest, RingRecorder
from tests.trace.events.kernel import REGISTERS, make_kernel

TARGET = TARGETS["x86_64"]
KERNEL, STACK = TARGET.kernel, TARGET.stack
CALLER = KERNEL + 0x123


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "r=$retval s=+0($retval):string",
        "r=$retval:u8 u=+8(%dx):s16 b=$retval:b3@5/32 c=%r15",
        "sp=%sp ip=%ip top=$stack0 p=$stack task=$comm",
        "a=+0(+8($retval)):x64[3] f=+0(%bx):string",
    ],
)
def test_records_of_returns_are_equal(arguments: str) -> None:
    kernel = make_kernel()
    kernel.events.write(f"r:a vfs_read {arguments}\n".encode())
    [event] = kernel.events.events()
    guest, rng = Guest(EntryKind.RETURN), Random(7)
    recorder = RingRecorder(guest, 0)
    event.enable(recorder)
    for number in range(20):
        for name in REGISTERS:
            setattr(guest.regs, name, rng.choice([KERNEL + rng.randrange(8192), rng.randrange(1 << 64), 3]))
        guest.regs.sp = STACK + 16384 - 512
        guest.memory.word(guest.regs.sp - TARGET.arch.word_size, CALLER)
        guest.memory.word(KERNEL + 8 * number, KERNEL + 16)
        guest.set_context(number % 3, 0, interrupts=number % 2 == 0)
        guest.regs.ip = CALLER
        guest.advance(1000)
        guest.hit(event, return_address=CALLER)
    recorder.same()


@pytest.mark.parametrize("arguments", ["x=%cx", "x=%di r=$retval", "x=%flags"])
def test_what_the_function_has_overwritten_is_left_to_python(arguments: str) -> None:
    """Events of return probes that fetch cx, di or flags are left to Python. In guest code, these registers
    have values of that code.
    """
    kernel = make_kernel()
    kernel.events.write(f"r:a vfs_read {arguments}\n".encode())
    [event] = kernel.events.events()
    guest = Guest(EntryKind.RETURN)
    event.enable(RingRecorder(guest, 0))
    assert guest.compile(event) is None
