"""Event filters: parsing, the predicates they compile to, and the filter files."""
