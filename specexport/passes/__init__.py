"""Passes over the traced model: one pass a file, each reporting how many things it changed."""
