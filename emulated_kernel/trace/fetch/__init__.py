"""Fetch arguments: their types, their compilation to fetch programs, and the execution of programs at a hit.

Other subpackages use the parser (fetchargs), its result (probe_arg), FetchType, and the stages that a
hit runs. A fetch program only reads guest memory. All objects are immutable, so there is no lock.
"""
