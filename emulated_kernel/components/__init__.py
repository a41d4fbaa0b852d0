"""The components of a kernel that is probed: how they are built, and what connects several of them.

probe_engine builds the registries of probes, tracing builds tracing, and records holds the results. Both
makes of kernel use these builders. ClockSwitch, ModuleNotifier and GuestDirectories connect layers below: the
clock with the trace arrays, the guest's modules with symbols, probes and events, and events with directories
in the guest. The kernel's composition root passes the functions by which they reach the guest. Callers hold
the control lock.
"""
