"""Packed steps and the KV cache: from the work of sequences to the flat arrays of the graph contract."""
