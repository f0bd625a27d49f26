"""Backends: what builds engines out of a traced model, one file each, behind one registry."""
