"""kprobefs's own small guest kernel, as its host uses it.

The host boots it, keeps a guest task for each host process, and makes system calls in these tasks.
`guest.Guest` is the interface for the mount; `builtin_kernel.BuiltinKernel` reads the running kernel.

All methods are called under the control lock while the guest is stopped. Only workloads/ has threads, which
take that lock for one piece of work at a time. This package does not import tracing, which observes tasks
through TaskEvents.
"""
