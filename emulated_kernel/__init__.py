"""An emulated Linux-like kernel whose machine code can be probed; it needs neither FUSE nor a command line.

The interface is kernel.Kernel and util.config.MachineConfig, and vfs for mounts. A kernel has one lock, the
control lock (util/control_lock.py). The public API takes it; direct users of the subpackages must take it
first.
"""
