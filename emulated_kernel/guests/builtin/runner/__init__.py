"""Running the guest: runners for one CPU and for several, and system calls of guest tasks.

`guest_runner.GuestRunner` runs the guest until the system call of one task has ended or sleeps.
`smp.SmpGuestRunner` does the same for several CPUs, which run in turns. `syscalls.Syscalls` offers system
calls as Python methods that take paths and bytes.
"""
