"""The context of a hit: registers and memory, the task, the context flags and the call chain.

One ProbeHit object serves all hits of a kind. Its data is valid only while a handler runs.
"""
