"""Views of a struct pt_regs in guest memory, through which handlers at detours and fentry sites read and set
registers.
"""

from __future__ import annotations

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.codegen.pt_regs import PtRegsFrames
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_view_is_the_guests_memory(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        memory = kernel.machine.memory
        word = kernel.arch.word_size
        names = kernel.arch.pt_regs
        frames = PtRegsFrames(memory, names, word)
        at = kernel.machine.alloc_pages(PAGE_SIZE)
        frame = frames[at]
        for number, name in enumerate(names):
            memory.write_word(at + number * word, number + 1)
            assert getattr(frame, name) == number + 1
            setattr(frame, name, -1)
            assert getattr(frame, name) == memory.read_word(at + number * word) == (1 << 8 * word) - 1
        with pytest.raises(AttributeError):
            frame.no_register = 1
        assert frames[at] is frame
        for other in range(at + word, at + 200 * word, word):
            assert getattr(frames[other], names[0]) == memory.read_word(other)
            assert len(frames) <= 100
        with pytest.raises(MemoryFault):
            frames[0]
