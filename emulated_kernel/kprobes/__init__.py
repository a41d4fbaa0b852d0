"""The probe engine: kprobes and what stands on them (kretprobe, fprobe, jprobe), down to a hit's registers.

From outside: Kprobes, Kretprobes, Fprobes, Jprobes, and the probes that they take; these know the rest.
Whoever registers, arms, optimizes or frees holds the control lock (emulated_kernel.lock), the only lock of
the host's that is known here, and the guest stands still. Hits happen while the guest runs, under the lock
of whoever runs it: they register and free nothing, and patch text only where SplitJumps.may_patch() says
so. Below it are the locks of return_hook's shadow stacks, in guest code alone: Python waits for none, and
no CPU is preempted that holds one.
"""
