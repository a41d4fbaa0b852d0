"""Events as guest code: handler programs that fetch, filter and record, and the memory that they write to.

Other subpackages use handler.py and graph.py, which make programs, and GuestRecords. GuestAddresses has the
addresses that programs use. Programs are made under the control lock. They run in the guest, which holds no
lock.
"""
