"""Deviations of Unicorn from a CPU: a self-test at each start checks them, with one function for each.

harness.py runs pieces of code and has the checks of all CPUs. x86.py and riscv.py have the checks of their
CPUs, and stops.py finds the places where a run can be stopped.
"""
