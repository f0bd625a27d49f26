"""What padding costs a batch, and what speculation gains, from an acceptance model alone.

=================  ===============================================================
``closed_form``    exact expectations of one round, and the expected speedup
``monte_carlo``    the same round simulated token by token; whole generations
``report``         rows of a table, JSON record
``plot``           a picture of the rows
``command``        ``specexport simulate``
=================  ===============================================================

Needs numpy only; a plot needs the extra ``bench``.
"""
