"""Guest text: all code that writes it, the ledger of original bytes, and the emulation of stale fetches.

`text.Text` writes bytes at once. `text_poke.TextPoker` writes in steps that are safe for CPUs that execute
the text. `module_space` loads the text of modules. `stale_fetch` lets CPUs execute old bytes, for tests.
"""
