"""Tracers (function, function_graph and stack), the functions that they trace, and the function profiler.

Other subpackages use KernelFunctions, StackTracer, and the tracers (function_tracer.py, graphs.py). Tracers
are switched under the control lock while the guest is stopped. Their handlers are called during hits.
"""
