"""An emulated Linux-like kernel whose real machine code can be probed; no FUSE, no command line.

From outside: kernel.Kernel, config.MachineConfig, and for a mount what vfs names. A kernel has one lock,
the control lock (lock.py), which the public API takes by itself; who uses the rooms below takes it first.
"""
