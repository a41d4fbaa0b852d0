"""A distribution's own kernel, booted in the machine from its first instruction.

pc.py is the computer, cpu.py what the emulator leaves out of its CPU; boot.py brings a kernel to its init
(init.py), and snapshot.py keeps that. tasks.py makes clients tasks of that kernel, syscalls.py makes its
system calls for them, and linux_mount.py its files a mount.
"""
