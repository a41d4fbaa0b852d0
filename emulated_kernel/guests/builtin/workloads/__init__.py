"""Background workloads: tasks that make system calls at a limited rate and for a limited duration.

The tasks run in kprobefs's own kernel. Each workload has a host thread, which takes the control lock in
slices of about 2 ms.
"""
