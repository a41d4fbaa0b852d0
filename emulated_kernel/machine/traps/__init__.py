"""Traps, which end a run of the guest, and the errors that the machine raises.

All modules may import this subpackage. It has no state, so no lock is needed.
"""
