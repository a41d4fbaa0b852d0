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
    from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
    from emulated_kernel.guests.common.host_processes import ProcessWatch
    from emulated_kernel.kernel.api import Kernel
    from emulated_kernel.kprobes.codegen.asm_handlers import PerCpuVars
    from emulated_kernel.kprobes.kinds.fprobe import Fprobe, FprobeHandler, FprobeRegs
    from emulated_kernel.kprobes.kinds.hit_ring import HitRing, RingEntry
    from emulated_kernel.kprobes.kinds.jprobe import Jprobe, JprobeHandler, Jprobes
    from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe, KretprobeHandler, KretprobeInstance
    from emulated_kernel.kprobes.kprobe import (
        BreakHandler,
        FaultHandler,
        Kprobe,
        KprobeFlag,
        PostHandler,
        PreHandler,
    )
    from emulated_kernel.kprobes.profile import (
        PROFILES,
        Profile,
        QuiesceMethod,
        RegisterSaving,
        Stepper,
        TrampolineForm,
    )
    from emulated_kernel.kprobes.regs import I386Regs, RiscvRegs, X86Regs
    from emulated_kernel.machine.guest_info import Message, ModuleInfo
    from emulated_kernel.machine.traps.trap import MemoryFault
    from emulated_kernel.util.config import ARCHITECTURES, ElfMachine, MachineConfig
    from emulated_kernel.util.control_lock import ControlLock
    from emulated_kernel.util.errors import KernelError
    from emulated_kernel.util.limits import Limit, Limits
    from emulated_kernel.vfs.core.client import Client
    from emulated_kernel.vfs.core.node import Node, Owner
    from emulated_kernel.vfs.core.node_tree import NodeTree
    from emulated_kernel.vfs.mount import Mount

__all__ = [
    "ARCHITECTURES",
    "PROFILES",
    "BreakHandler",
    "Client",
    "ControlLock",
    "ElfMachine",
    "FaultHandler",
    "Fprobe",
    "FprobeHandler",
    "FprobeRegs",
    "HitRing",
    "I386Regs",
    "Jprobe",
    "JprobeHandler",
    "Jprobes",
    "Kernel",
    "KernelError",
    "Kprobe",
    "KprobeFlag",
    "Kretprobe",
    "KretprobeHandler",
    "KretprobeInstance",
    "Limit",
    "Limits",
    "MachineConfig",
    "MemoryFault",
    "Message",
    "ModuleInfo",
    "Mount",
    "Node",
    "NodeTree",
    "Owner",
    "PerCpuVars",
    "PostHandler",
    "PreHandler",
    "ProcessWatch",
    "Profile",
    "QuiesceMethod",
    "RegisterSaving",
    "RingEntry",
    "RiscvRegs",
    "RootLayout",
    "Stepper",
    "TrampolineForm",
    "X86Regs",
]

_MODULES = {
    "ARCHITECTURES": "util.config",
    "PROFILES": "kprobes.profile",
    "BreakHandler": "kprobes.kprobe",
    "Client": "vfs.core.client",
    "ControlLock": "util.control_lock",
    "ElfMachine": "util.config",
    "FaultHandler": "kprobes.kprobe",
    "Fprobe": "kprobes.kinds.fprobe",
    "FprobeHandler": "kprobes.kinds.fprobe",
    "FprobeRegs": "kprobes.kinds.fprobe",
    "HitRing": "kprobes.kinds.hit_ring",
    "I386Regs": "kprobes.regs",
    "Jprobe": "kprobes.kinds.jprobe",
    "JprobeHandler": "kprobes.kinds.jprobe",
    "Jprobes": "kprobes.kinds.jprobe",
    "Kernel": "kernel.api",
    "KernelError": "util.errors",
    "Kprobe": "kprobes.kprobe",
    "KprobeFlag": "kprobes.kprobe",
    "Kretprobe": "kprobes.kinds.kretprobe",
    "KretprobeHandler": "kprobes.kinds.kretprobe",
    "KretprobeInstance": "kprobes.kinds.kretprobe",
    "Limit": "util.limits",
    "Limits": "util.limits",
    "MachineConfig": "util.config",
    "MemoryFault": "machine.traps.trap",
    "Message": "machine.guest_info",
    "ModuleInfo": "machine.guest_info",
    "Mount": "vfs.mount",
    "Node": "vfs.core.node",
    "NodeTree": "vfs.core.node_tree",
    "Owner": "vfs.core.node",
    "PerCpuVars": "kprobes.codegen.asm_handlers",
    "PostHandler": "kprobes.kprobe",
    "PreHandler": "kprobes.kprobe",
    "ProcessWatch": "guests.common.host_processes",
    "Profile": "kprobes.profile",
    "QuiesceMethod": "kprobes.profile",
    "RegisterSaving": "kprobes.profile",
    "RingEntry": "kprobes.kinds.hit_ring",
    "RiscvRegs": "kprobes.regs",
    "RootLayout": "guests.builtin.trees.root_layout",
    "Stepper": "kprobes.profile",
    "TrampolineForm": "kprobes.profile",
    "X86Regs": "kprobes.regs",
}
"""Public name -> the module that defines it, within this package."""

if not TYPE_CHECKING:

    def __getattr__(name):
        """Import the public name `name` at its first use, and return its value."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        """Return the public names, and the names that this module itself has."""
        return sorted({*globals(), *__all__})
