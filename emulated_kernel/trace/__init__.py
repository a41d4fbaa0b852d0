"""Trace events: definitions, fetch arguments, ring buffer, text.

Other packages use the objects that TracingComponents lists. A contract in pyproject.toml orders the
subpackages. Every caller holds the control lock: the thread of a request, or the thread that runs the guest.
A hit adds to buffers and counts, and runs triggers; all other changes happen while the guest is stopped.
Readers that wait for records (array/trace_pipe.py) wait without the lock.
"""
