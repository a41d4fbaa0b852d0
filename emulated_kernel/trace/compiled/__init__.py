"""Events as guest code: handler programs for fetching, filtering and recording, and where these write.

From outside: handler.py and graph.py, which make programs, GuestRecords, and places.py, which says where
they write. Programs are made under the control lock; what they do runs in the guest, which holds none.
"""
