"""Host processes as guest tasks.

`process_tracker.ProcessTracker` keeps a guest task for each host process. A ProcessWatch reports forks, exits
and names of the host's processes; `isolated.IsolatedProcesses` is one that reports only the mount's clients.
"""
