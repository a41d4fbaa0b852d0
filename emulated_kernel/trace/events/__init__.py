"""Events: what they are called, how they are laid out and switched; static, syscall and marker events.

From outside: EventRegistry, TraceEvent and, of a trace array, ArrayEvents. Under the control lock: events
are added, removed and switched while the guest stands still; TraceEvent.record() is what a hit calls.
"""
