"""Text of records: lines, headers, the function graph's tree, and the options that they follow.

From outside: trace_file.trace_lines() and the options of an array. It reads buffers and changes none; under
the control lock, as a text is rendered whole at open.
"""
