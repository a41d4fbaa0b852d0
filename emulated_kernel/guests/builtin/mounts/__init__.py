"""Requests made by a client's task inside the guest, and the guest's own file systems, scratch/ and dev/.

GuestMount takes the control lock for each request; a Scratch is called with it held.
"""
