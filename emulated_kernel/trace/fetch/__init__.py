"""Fetch arguments: types, parsing into a fetch program, and running it at a hit.

From outside: parsing (fetchargs), a FetchType, and the run of a program, which reads the guest's memory
alone. Nothing here changes; no lock.
"""
