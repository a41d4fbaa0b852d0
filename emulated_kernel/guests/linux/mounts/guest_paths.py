"""Where the files of a mount are in a distribution's kernel."""

from __future__ import annotations

from emulated_kernel.guests.linux.initramfs import DEVICES, PROC, TMPFS, TRACEFS

LINKED = ("/kprobe_events", "/kprobe_profile")
"""Files of tracefs that the root shows too."""
LASTING = ("kprobes", "machine", "scratch", "tracing")
"""Directories of the root that are there as long as the mount."""
MACHINE = "/machine"
DMESG = "/machine/dmesg"
MODULES = "/machine/modules"
FORWARDED = {f"{MACHINE}/{name}": f"{PROC}/{name}" for name in ("kallsyms", "meminfo", "modules", "version")}
"""File of machine/ -> where it is in the guest."""
TOPS = {"tracing": TRACEFS, "scratch": TMPFS, "sysctl": f"{PROC}/sys", "dev": DEVICES}
"""Directory of the root that isn't debugfs's -> where it is in the guest."""
PATHS = 500
"""Paths whose place in the guest is remembered; nobody has many in use at once."""
