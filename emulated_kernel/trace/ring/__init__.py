"""Ring buffers in Linux's layout, which both guest code and the host write.

Other subpackages use RingBuffer, TraceClock and the layout that guest code is compiled for.
All state of a buffer is in guest memory. Python changes the state under the control lock. Guest code changes
only its own CPU's buffer and takes no lock.
"""
