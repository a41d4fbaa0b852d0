"""Host machine code for the guest's traps, rdtsc and copies to user memory.

x86_64.s and aarch64.s are the source for two kinds of hosts, and routines.py has the assembled bytes.
`python -m emulated_kernel.machine.native.assemble` makes the bytes again. trap_words.py, tsc_words.py
and copy_words.py declare the memory that the code uses.
"""
