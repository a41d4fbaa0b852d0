"""Trace events: their names and record layouts, and how they are switched on and off.

Other subpackages use EventRegistry, TraceEvent, and ArrayEvents, which switches one trace array's events.
Callers hold the control lock. They add, remove and switch events while the guest is stopped. A hit calls
TraceEvent.record().
"""
