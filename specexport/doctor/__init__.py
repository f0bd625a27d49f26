"""``specexport doctor``: what this machine can run, and why not. Imports nothing heavy to find out."""
