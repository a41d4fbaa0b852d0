"""Ring buffers in Linux's layout, which both guest code and the host write.

Other subpackages use RingBuffer, TraceClock and the layout that guest code is compiled for.
The state is guest memory. Python changes it under the control lock; guest code changes only its own CPU's
buffer and takes no lock.
"""
