"""Traps, which end a run of the guest, and the errors that the machine raises. Any module may import them.

Nothing in this subpackage has state, so no lock is needed.
"""
