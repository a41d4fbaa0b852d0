"""Relocated AArch64 instructions: in a detour they have the same effect as in place."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from errno import EINVAL, ERANGE

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arm64.insn import SIZE
from emulated_kernel.arch.arm64.relocate import Relocation, relocation_of
from emulated_kernel.machine.interrupts.trap_handlers import LinkedJump
from emulated_kernel.util.errors import KernelError
from tests.arch.arm64.moved import ARCH, BUFFER, CODE, Mover, mover
from tests.arch.arm64.test_emulate import words

NOP, BLR_X1 = 0xD503201F, 0xD63F0020
COPIED = (
    *(NOP, 0xD503233F, 0xD5033FDF, 0xD5033BBF),  # nop, paciasp, isb, dmb ish
    *(0xF9400020, 0xF81F0FFE, 0xA9BF7BFD, 0xA8C17BFD),  # ldr, str with writeback, stp, ldp
    *(0x3DC00020, 0x4EA01C01, 0x1E622820),  # ldr q0, mov v1, fadd
    *(0xF90003E0, 0x910043FF, 0xEB01001F, 0x9A810000, 0xD3400000),  # str to sp, add sp, cmp, csel, ubfx
    *(0xB8616840, 0xC8DFFC20, 0xC89FFC20, 0xD5384100),  # ldr with register, ldar, stlr, mrs sp_el0
)


@pytest.fixture(scope="module")
def moving() -> Iterator[Mover]:
    with mover(7) as found:
        yield found


def test_in_place_and_relocated(moving: Mover) -> None:
    """Instructions of each relocated kind, and copied instructions, have the same effect in a detour as in
    place.

    Some of these instructions fault.
    """
    rng = random.Random(3)
    found = set()
    for _ in range(15):
        for word in (*words(rng), *COPIED):
            kind = relocation_of(word)
            if kind is not Relocation.REFUSED:
                assert not moving.differs(word)
                found.add(kind)
    assert found == set(Relocation) - {Relocation.REFUSED}


@pytest.mark.parametrize(
    "word",
    [
        BLR_X1,
        0xD65F0BFF,  # retaa
        0x5800001F,  # ldr xzr, .
        0x54000010,  # bc.eq .
        0xC85F7C20,  # ldxr x0, [x1]
        0xD69F03E0,  # eret
        0x9C000040,  # ldr q0, .+8
        0xD4200000,  # brk
    ],
)
def test_what_is_not_moved(word: int) -> None:
    with pytest.raises(KernelError) as refused:
        ARCH.detour(Region(CODE, struct.pack("<I", word)), BUFFER)
    assert refused.value.errno == EINVAL
    is_call = word == BLR_X1
    assert (ARCH.emulated_region(struct.pack("<I", word), CODE) is None) is not is_call


@pytest.mark.parametrize("register", range(32))
def test_a_blr_at_the_end_of_a_stub(register: int) -> None:
    """At the end of a stub, a `blr` is replaced by a breakpoint.

    The handling of the breakpoint continues at the address in `register` and sets x30 to the return address.
    """
    region = ARCH.emulated_region(struct.pack("<I", 0xD63F0000 | register << 5), CODE)
    if register == 31:
        assert region is None
        return
    assert region is not None
    end = ARCH.stub_end(region, BUFFER)
    assert end.code == ARCH.breakpoint
    jump = LinkedJump(f"x{register}", 0, (1 << 64) - 1, "x30", CODE + SIZE)
    assert end.leads == {BUFFER: jump}
    place = ARCH.original_place(region, BUFFER, BUFFER)
    assert (place.address, place.is_calling) == (CODE, False)


def test_what_is_out_of_reach() -> None:
    """A jump to a detour, the jump back, and a relocated branch fail with ERANGE if their target is 128 MiB
    or more away.
    """
    region = Region(CODE, struct.pack("<I", NOP))
    far = CODE + (1 << 27)
    with pytest.raises(KernelError) as refused:
        ARCH.detour_jump(region, far)
    assert refused.value.errno == ERANGE
    assert len(ARCH.detour_jump(region, far - SIZE)) == SIZE
    for word, at in ((NOP, far + 2 * SIZE), (0x15FFFFFF, BUFFER)):
        with pytest.raises(KernelError) as refused:
            ARCH.detour(Region(CODE, struct.pack("<I", word)), at)
        assert refused.value.errno == ERANGE


def test_places_in_a_relocated_call() -> None:
    """A CPU within a relocated call counts as being at the call. At the end of the code, it counts as being
    at the next instruction.

    At the last jump, the return address is already set.
    """
    region = Region(CODE, struct.pack("<I", 0x94000010))
    code = ARCH.relocated(region, BUFFER)
    places = [ARCH.original_place(region, BUFFER, BUFFER + at) for at in range(0, len(code), SIZE)]
    assert [place.address for place in places] == [CODE] * (len(places) - 1) + [CODE + SIZE]
    assert [place.is_calling for place in places] == [False] * (len(places) - 2) + [True, False]
