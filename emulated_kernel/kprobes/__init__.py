"""The probe engine: kprobes, and kretprobes, fprobes and jprobes on top of them.

Other packages use Kprobes, Kretprobes, Fprobes and Jprobes, and the probes that these register.
The caller of each function that registers, arms, optimizes or frees holds the control lock, and the guest is
stopped. Hits happen while the guest runs; the thread that runs it holds the lock. A hit registers and frees
nothing. It patches text only where PartialJumpDetector.may_patch() allows it.

The shadow stacks of the subpackage return_hook have locks in guest code. Python never waits for them, and a
CPU that holds one is not preempted.
"""
