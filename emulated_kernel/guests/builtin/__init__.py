"""The guest as its host sees it: booted, given the host's processes as tasks, and asked for system calls.

`guest.Guest` is what the front end takes; `builtin_kernel.BuiltinKernel` reads the kernel that runs.
Everything here is called under the control lock, and while the guest stands still; only loads/ has
threads, which take that lock for a slice at a time. Nothing here knows of trace: what trace keeps for
tasks are callbacks of TaskEvents.
"""
