"""The hardware: memory, vCPUs, traps, text_poke. The only package that imports unicorn."""
