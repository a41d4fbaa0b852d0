"""Trace arrays, the top one and instances: ring buffers with options, clock, readers and snapshots.

Other subpackages use TraceArray, and TracingServices, which holds the services that all trace arrays share.
Every caller holds the control lock, except a waiting reader. A reader of trace_pipe or trace_pipe_raw waits
without the lock. To read the buffers again, it takes the lock.
"""
