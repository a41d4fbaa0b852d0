"""Background workloads: guest tasks of kprobefs that make system calls at a limited rate for a limited time.

Each workload has a host thread, which takes the control lock in slices of about 2 ms.
"""
