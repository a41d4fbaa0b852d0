"""Tracers: function, function_graph and stack, the functions that they trace, and call chains."""
