"""Trace events: definitions, fetch arguments, ring buffers and the texts of tracefs's files.

Other packages use the objects that TracingComponents lists. The contract "layers of tracing" in
pyproject.toml orders the subpackages in layers; each imports only lower ones.
Every caller holds the control lock: either the thread of a request or the thread that runs the guest.
A hit writes to buffers, counts, and runs triggers. All other changes happen while the guest is stopped.
Readers that wait for records (array/trace_pipe.py) wait without the lock.
"""
