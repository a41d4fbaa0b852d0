"""Trace arrays: ring buffers with options, clock, readers and snapshots. There are a top one and instances.

Other subpackages use TraceArray, and TracingServices, which holds what all trace arrays share.
Every caller holds the control lock, except a reader that waits. Readers of trace_pipe and of raw pages wait
for an Event of trace_pipe.py without the lock, and take the lock to look again.
"""
