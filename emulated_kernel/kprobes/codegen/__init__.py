"""Guest code of probes: handlers compiled or assembled to guest code, and the memory that holds it.

Code that is taken out of use goes to DeferredFree. The code is freed under the control lock, as soon as no
CPU and no task can be in it.
"""
