"""An emulated Linux-like kernel whose real machine code can be probed; it needs neither FUSE nor root.

    from emulated_kernel import Kernel, Kprobe

The names of `__all__` are the public API. Each is imported when it is first used, so that importing this
package imports nothing else.

The subpackages, from above to below, are kernel, guests, vfs, components, trace, kprobes, arch, machine,
image and util. A kernel has one lock, the control lock. The methods of Kernel take it. Code that uses the
subpackages takes it first.
"""

# Type checkers take this name for True, as typing.TYPE_CHECKING. Importing typing would slow the start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.kernel.api import Kernel
    from emulated_kernel.kprobes.kinds.fprobe import Fprobe, FprobeRegs
    from emulated_kernel.kprobes.kinds.hit_ring import HitRing, RingEntry
    from emulated_kernel.kprobes.kinds.jprobe import Jprobe
    from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe, KretprobeInstance
    from emulated_kernel.kprobes.kprobe import Kprobe
    from emulated_kernel.kprobes.profile import PROFILES, Profile
    from emulated_kernel.kprobes.regs import I386Regs, RiscvRegs, X86Regs
    from emulated_kernel.machine.guest_info import Message, ModuleInfo
    from emulated_kernel.machine.traps.trap import MemoryFault
    from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
    from emulated_kernel.util.errors import KernelError

__all__ = [
    "ARCHITECTURES",
    "PROFILES",
    "Fprobe",
    "FprobeRegs",
    "HitRing",
    "I386Regs",
    "Jprobe",
    "Kernel",
    "KernelError",
    "Kprobe",
    "Kretprobe",
    "KretprobeInstance",
    "MachineConfig",
    "MemoryFault",
    "Message",
    "ModuleInfo",
    "Profile",
    "RingEntry",
    "RiscvRegs",
    "X86Regs",
]

_MODULES = {
    "ARCHITECTURES": "util.config",
    "PROFILES": "kprobes.profile",
    "Fprobe": "kprobes.kinds.fprobe",
    "FprobeRegs": "kprobes.kinds.fprobe",
    "HitRing": "kprobes.kinds.hit_ring",
    "I386Regs": "kprobes.regs",
    "Jprobe": "kprobes.kinds.jprobe",
    "Kernel": "kernel.api",
    "KernelError": "util.errors",
    "Kprobe": "kprobes.kprobe",
    "Kretprobe": "kprobes.kinds.kretprobe",
    "KretprobeInstance": "kprobes.kinds.kretprobe",
    "MachineConfig": "util.config",
    "MemoryFault": "machine.traps.trap",
    "Message": "machine.guest_info",
    "ModuleInfo": "machine.guest_info",
    "Profile": "kprobes.profile",
    "RingEntry": "kprobes.kinds.hit_ring",
    "RiscvRegs": "kprobes.regs",
    "X86Regs": "kprobes.regs",
}
"""Public name -> the module that defines it, within this package."""

if not TYPE_CHECKING:

    def __getattr__(name):
        """Import a public name at its first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        """Return the public names and the module's own."""
        return sorted({*globals(), *__all__})
