"""Histogram triggers: counting hits by key, variables between events, and what follows from them.

From outside: trigger.HistCommand, a command of triggers, and system.HistServices. Under the control lock:
hits count into maps, files read and clear them while the guest stands still.
"""
