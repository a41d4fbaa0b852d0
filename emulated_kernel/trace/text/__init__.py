"""Text on its way in and out: commands' words and numbers, printf, error_log, the lines of a trace."""
