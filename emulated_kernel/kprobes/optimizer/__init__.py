"""Jump optimization: the delayed optimizer of Linux, and djprobe's commit, which is another kind of it.

What may be optimized is arch's verdict. Both change text and lists under the control lock, never in a hit.
"""
