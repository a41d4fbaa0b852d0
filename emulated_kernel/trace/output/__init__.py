"""Text of trace records: lines, headers, the function graph's tree, and trace options.

Other subpackages use trace_file.trace_lines() and the options of a trace array. No module here changes a
buffer. All functions run under the control lock, because a file's text is rendered completely at open.
"""
