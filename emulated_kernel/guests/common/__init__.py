"""Host processes, programs and clocks: what both kinds of guests need."""
