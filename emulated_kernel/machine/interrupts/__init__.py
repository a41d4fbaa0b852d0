"""Interrupts and exceptions: callbacks of the emulator, hidden exception state, delivery to the guest.

Other packages use `TrapHandlers` through `Machine.breakpoints`. A callback runs during a run of the
guest: it raises nothing (TrapHooks stores exceptions for later), and it must not run the guest.
"""
