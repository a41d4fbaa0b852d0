"""How the guest is interrupted: the emulator's callbacks, what they hide, and a CPU's way into a handler.

From outside: `hooks.Breakpoints`, by `Machine.breakpoints`. A callback runs within a run of the guest: it
raises nothing (TrapHooks parks what is raised), and calls nothing that runs the guest again.
"""
