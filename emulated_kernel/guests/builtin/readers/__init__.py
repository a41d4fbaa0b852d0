"""What the guest's own structures say, read while it stands still: log, tasks, CPUs, memory, modules.

Each reader knows the layouts of our kernel's ABI table; BuiltinKernel is who asks them.
"""
