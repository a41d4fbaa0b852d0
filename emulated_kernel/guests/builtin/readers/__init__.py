"""Readers of the guest's data structures: log, tasks, CPUs, memory, modules.

The readers are functions and classes that BuiltinKernel calls. They read the memory of a stopped guest with
the offsets in the guest's ABI table.
"""
