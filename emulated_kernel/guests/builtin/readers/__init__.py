"""Readers of the guest's data structures: log, tasks, CPUs, memory, modules.

They read the memory of a stopped guest with the offsets in its ABI table. BuiltinKernel calls them.
"""
