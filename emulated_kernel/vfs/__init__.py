"""Files: what processes see of a kernel, and how their requests reach it.

`core` has kinds of files and knows no kernel; `trees` makes tracefs, debugfs and our own directories of them,
over the objects of trace, kprobes and host; `guest` lets the client's task in the guest make each request.
From outside take RootLayout and build_filesystem (trees), and GuestMount. The control lock is
held around everything but what waits for a trace_pipe.
"""
