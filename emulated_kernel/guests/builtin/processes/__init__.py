"""Host processes as guest tasks: who is a client, what it is called, where it stands.

`mirror.ProcessTracker` keeps the tasks, processes.py looks at /proc; its ProcessWatch is silent, for the
API.
"""
