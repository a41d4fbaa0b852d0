"""Event filters: their parser, and the programs of predicates to which they are compiled.

Other subpackages use parse.py, which parses and compiles a filter. The result is an EventFilter, which
decides at each hit whether the hit is recorded. A filter is immutable. It is assigned to its event under the
control lock.
"""
