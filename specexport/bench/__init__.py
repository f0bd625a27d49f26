"""``specexport bench``: every method of decoding a bundle, measured side by side over one code path.

Drives the runtime through its public API. Imports no torch; matplotlib only when something is drawn.
"""
