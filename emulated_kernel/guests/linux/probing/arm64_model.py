"""LinuxArm64Model: the CPU model of an arm64 Linux, with guest addresses for the code that the host adds.

Linux does not use these addresses, which are after those of modules.
"""

from __future__ import annotations

from emulated_kernel.guests.linux.guest_abi import ARM64
from emulated_kernel.machine.cpu.arm64 import Arm64Cpu
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.util.fast_dataclass import replace


class LinuxArm64Model(Arm64Cpu):
    """CPU model of an arm64 Linux; the host's own pages are at addresses that Linux does not use."""

    def __init__(self, layout: MemoryLayout) -> None:
        super().__init__()
        self.layout = layout


def linux_arm64_model() -> LinuxArm64Model:
    """Return the CPU model, which places the host's code after the addresses of modules."""
    return LinuxArm64Model(replace(Arm64Cpu.layout, text_space=ARM64.modules.stop))
