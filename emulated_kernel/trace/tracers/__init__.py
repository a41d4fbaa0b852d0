"""Tracers: function, function_graph and stack, the functions that they trace, and call chains.

From outside: KernelFunctions, the tracers by name (functions.py, graphs.py) and StackTracer. Switched under
the control lock while the guest stands still; their users are called within hits.
"""
