"""Host machine code for the guest's traps, so that a trap whose next step is guest code needs no Python.

x86_64.s and aarch64.s are the source for two kinds of hosts, and routines.py has the assembled bytes.
`python -m emulated_kernel.machine.native.assemble` makes them again. trap_words.py is what the code reads.
"""
