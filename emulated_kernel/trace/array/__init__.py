"""Trace arrays: buffers with options, clock, readers and snapshots; the top one and instances.

From outside: TraceArray, and TracingServices, what all arrays share. Under the control lock; readers of
trace_pipe and of raw pages wait for records without it, by trace_pipe.py's Event, and take it to look
again.
"""
