"""Running the guest: the executive for one CPU and for several, and system calls through it.

`executive.Executive` runs until the call of one task has ended or sleeps, `smp.SmpExecutive` so several
CPUs in turns; syscalls.py makes calls of paths and bytes.
"""
