"""Code for both kprobefs's own kernel and distributions' kernels.

It is about host processes and their calls, programs, clocks, and files.
"""
