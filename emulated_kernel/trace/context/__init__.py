"""The context of a hit: registers and memory, the task, the context flags and the call chain.

One ProbeHit object is reused for all hits that arrive in the same way, such as kprobe hits or fprobe calls.
Its data is valid only while a handler runs.
"""
