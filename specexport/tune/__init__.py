"""``specexport tune``: finds the fastest draft length (K) on the user's prompts and writes it into a table.

Drives the runtime through its public API, with the benchmark's prompts, clock and engines. Imports no torch; matplotlib
only when something is drawn.
"""
