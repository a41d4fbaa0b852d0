"""Events as guest code: handler programs that fetch, filter and record, and the memory for their records.

Other subpackages use handler.py and graph.py, which emit programs, and GuestRecords. GuestAddresses has the
addresses that programs use. Programs are compiled under the control lock. They run in the guest and take no
lock.
"""
