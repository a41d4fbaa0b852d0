"""Guest runners for one CPU and for several CPUs, and the system calls of guest tasks.

`guest_runner.GuestRunner` runs the guest until the system call of one task has ended or sleeps.
`smp.SmpGuestRunner` does the same with several CPUs, which run in turns. `syscalls.Syscalls` offers system
calls as Python methods that take paths and bytes.
"""
