"""Background loads: real system calls by tasks of ours, a bounded number a second for a bounded time.

Each has a thread, which takes the control lock for a slice of 2 ms at most.
"""
