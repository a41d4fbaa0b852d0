"""Text on its way in and out: words and numbers of commands, printf, error_log and the lines of a trace.

Other subpackages may use everything here: functions and small tables. The contents of error_log and the saved
comms change under the control lock.
"""
