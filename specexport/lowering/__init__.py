"""Lowering: which body stands behind ``specexport::UnpaddedAttention`` on a backend."""
