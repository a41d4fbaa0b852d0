"""Trace events: their names, record layouts and switches; static, system call and marker events.

Other subpackages use EventRegistry, TraceEvent and ArrayEvents, which holds one trace array's events. All
calls are made under the control lock: events are added, removed and switched while the guest is stopped. A
hit calls TraceEvent.record().
"""
