"""Fetch arguments: types, parsing into a fetch program, and running it at a hit."""
