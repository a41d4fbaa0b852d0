"""The context of a hit: registers and memory, the task, the context flags and the call chain.

One ProbeHit object serves all hits of a backend. It is valid only during the call of a handler.
"""
