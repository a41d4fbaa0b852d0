"""Text of records: lines, headers, the function graph's tree, and the options that they follow."""
