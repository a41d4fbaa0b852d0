"""The components of a probed kernel: functions that build them, and objects that connect several of them.

`probe_engine` builds the registries of probes, `tracing` builds tracing, and `records` has classes for the
results. kprobefs's own kernel and distributions' kernels use these builders. ClockSwitch connects the clock
with the trace arrays. ModuleNotifier connects the guest's modules with symbols, probes and events.
GuestDirectories connects events with directories in the guest.
These objects reach the guest by functions that the kernel's composition root passes to them. Callers hold
the control lock.
"""
