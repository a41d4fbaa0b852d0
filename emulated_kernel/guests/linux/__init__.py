"""A distribution's own kernel, booted in the machine from its first instruction.

- pc: the emulated PC (CPU, RAM, devices, time).
- boot: the boot protocol, and snapshots of booted kernels. boot_cache.py combines them.
- guest: tasks of the kernel for client processes, the system calls that they make, and files.
- probing: kprobefs's probe engine and tracing over the kernel.
- mounts: the kernel's own files (native_mount.py), and kprobefs's files in addition (probed_mount.py). Their
  file systems share a LinuxGuest.
- vmcore: mounts of a core dump.

Other packages use the mounts, boot_cache.started() and snapshot.py. All work is done under the mount's
control lock, except reads of module files. LinuxGuest has a condition variable, on which requests wait for
activity of the guest. Its lock is taken after the control lock. No other lock is taken while the condition
variable's lock is held.
"""
