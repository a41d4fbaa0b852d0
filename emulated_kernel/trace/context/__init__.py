"""The hit being handled: its registers and memory, the task, the context flags, the call chain.

One ProbeHit object serves all hits of a backend and is valid during the handler's call only.
"""
