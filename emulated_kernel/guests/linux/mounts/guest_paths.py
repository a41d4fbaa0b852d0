"""Paths of a mount, and the paths in a distribution's kernel that they show."""

from __future__ import annotations

from emulated_kernel.guests.linux.initramfs import DEVICES, PROC, TMPFS, TRACEFS

LINKED = ("/kprobe_events", "/kprobe_profile")
"""Files of tracefs that the mount also shows in its root."""
LASTING = ("kprobes", "machine", "scratch", "tracing")
"""Directories of the mount's root that exist as long as the mount."""
MACHINE = "/machine"
CPU = "/machine/cpu"
DMESG = "/machine/dmesg"
GDB = "/machine/gdb"
HISTORY = "/machine/history"
LIMITS = "/machine/limits"
LOAD = "/machine/load"
MODULES = "/machine/modules"
VMCORE = "/machine/vmcore"
FORWARDED = {f"{MACHINE}/{name}": f"{PROC}/{name}" for name in ("kallsyms", "meminfo", "modules", "version")}
"""Path of a file of machine/ -> path of the file in the guest's procfs whose content it shows."""
TOPS = {"tracing": TRACEFS, "scratch": TMPFS, "sysctl": f"{PROC}/sys", "dev": DEVICES}
"""Name of a directory in the mount's root -> path in the guest; other names are in the guest's debugfs."""
PATHS = 500
"""Maximum number of paths in the mount whose paths in the guest are cached. Clients use few at a time."""
