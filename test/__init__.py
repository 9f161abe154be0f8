"""The tests. ``unit/ROOM`` and ``distributed/ROOM`` are for the rooms of the package, ``whole`` for what spans them.

``support`` has all that several folders share; a module that is a test is imported by nobody. The other folders are
named for where or how their tests run, and have helpers of their own.
"""
