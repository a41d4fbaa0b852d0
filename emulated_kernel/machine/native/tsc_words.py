"""TscWords: the host memory with a guest's time stamp counter, which the routine for rdtsc advances."""

from __future__ import annotations

import ctypes

STEP_FACTOR = 6364136223846793005
STEP_ADDEND = 1442695040888963407
"""Addend of the pseudo-random generator whose numbers are the steps of the time stamp counter.

The generator is a linear congruential one modulo 2**64.
"""
SHORTEST_STEP = 50
STEP_SHIFT = 57
"""Number of low bits to drop from the generator's state; the rest plus SHORTEST_STEP is a step in cycles."""


class TscWords(ctypes.Structure):
    """Host memory that the routine for rdtsc reads and writes. Unicorn passes its address to the routine."""

    _fields_ = (
        # Cycles since power-on, and the state of the generator of steps.
        ("tsc", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        # While it is not 0, Python executes rdtsc.
        ("followed", ctypes.c_uint64),
        # Address of the ctypes callback.
        ("read_in_python", ctypes.c_uint64),
        # Addresses in Unicorn's memory of the two registers for the result.
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
    )
