"""Running the guest: the executive for one CPU and for several, and system calls through it.

`executive.GuestRunner` runs until the call of one task has ended or sleeps, `smp.SmpGuestRunner` so several
CPUs in turns; syscalls.py makes calls of paths and bytes.
"""
