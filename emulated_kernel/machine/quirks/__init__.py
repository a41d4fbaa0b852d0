"""Deviations of Unicorn from a CPU: a self-test at each start checks them, with one function for each.

harness.py runs pieces of code and has the checks that all CPUs share. x86.py and riscv.py have the checks of
their CPUs. stops.py makes Unicorn stop runs only between blocks of code.
"""
