"""Event filters: parsing, and the predicates that they compile to.

Other subpackages use parse.py, which parses and compiles a filter, and its result, an EventFilter that hits
call. A filter is immutable. It is assigned to its event under the control lock.
"""
