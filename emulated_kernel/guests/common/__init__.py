"""Host processes, programs and clocks: code that both kinds of guests share."""
