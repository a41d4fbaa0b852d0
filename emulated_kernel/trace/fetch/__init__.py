"""Fetch arguments: their types, their compilation to fetch programs, and running these at a hit.

Other subpackages use the parser (fetchargs), FetchType, and the stages that a hit runs. A run only reads
guest memory. All objects are immutable, so there is no lock.
"""
