"""Paths in a distribution's kernel for the files of a mount."""

from __future__ import annotations

from emulated_kernel.guests.linux.initramfs import DEVICES, PROC, TMPFS, TRACEFS

LINKED = ("/kprobe_events", "/kprobe_profile")
"""Files of tracefs that the mount's root shows, too."""
LASTING = ("kprobes", "machine", "scratch", "tracing")
"""Directories of the root that exist as long as the mount."""
MACHINE = "/machine"
DMESG = "/machine/dmesg"
MODULES = "/machine/modules"
FORWARDED = {f"{MACHINE}/{name}": f"{PROC}/{name}" for name in ("kallsyms", "meminfo", "modules", "version")}
"""Path of a file of machine/ -> path in the guest."""
TOPS = {"tracing": TRACEFS, "scratch": TMPFS, "sysctl": f"{PROC}/sys", "dev": DEVICES}
"""Directory of the root that does not come from debugfs -> path in the guest."""
PATHS = 500
"""Number of paths whose path in the guest is cached. Clients use few paths at a time."""
