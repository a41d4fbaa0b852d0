"""Event filters: parsing, the predicates they compile to, and the filter files.

From outside: build.py, which parses and compiles, and what it gives, a predicate that a hit calls. A filter
is a value, put into its event under the control lock.
"""
