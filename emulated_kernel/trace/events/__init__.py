"""Trace events: their names, record layouts and switches; static, system call and marker events.

Other subpackages use EventRegistry, TraceEvent, and ArrayEvents, which switches one trace array's events.
Callers hold the control lock. They add, remove and switch events while the guest is stopped. A hit calls
TraceEvent.record().
"""
