"""Ring buffers in Linux's layout, which guest code and the host write alike.

From outside: RingBuffer, TraceClock and the layout that guest code is made by. Its state is guest memory:
Python changes it under the control lock, guest code by one CPU's own writes without any.
"""
