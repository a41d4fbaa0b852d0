"""Text of records: lines, headers, the function graph's tree, and the options that control them.

Other subpackages use trace_file.trace_lines() and the options of a trace array. This subpackage reads buffers
and changes none. It runs under the control lock, because a text is rendered completely at open.
"""
