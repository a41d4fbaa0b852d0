"""Code that both kinds of guests share: host processes and their calls, programs, clocks, and files."""
