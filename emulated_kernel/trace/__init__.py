"""Trace events: definitions, fetch arguments, ring buffer, text.

From outside: what parts.TraceParts lists, which build.py makes. A contract in pyproject.toml orders the
subpackages. All of it is called with the control lock held, the only lock known here: files by who asks,
hits by who runs the guest. A hit adds to buffers and counts, and does what triggers say; all other changes
happen while the guest stands still. Readers that wait for records (array/trace_pipe.py) wait without the
lock.
"""
