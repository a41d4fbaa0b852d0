"""Host machine code that Unicorn calls, for example for the guest's traps, rdtsc and copies of user memory.

x86_64.s and aarch64.s are the source for two kinds of hosts, and routines.py has the assembled bytes.
`python -m emulated_kernel.machine.native.assemble` makes the bytes again. The modules `*_words.py` declare
the memory that the code uses.
"""
