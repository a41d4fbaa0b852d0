"""Guest text: its only writers, with a ledger of each byte, and what CPUs fetched before it changed.

`text.Text` writes at once, `text_poke.TextPoker` in the steps that CPUs in between survive,
`module_space` what modules bring. stale_fetch.py says what a CPU might still run. Nothing
else writes text.
"""
