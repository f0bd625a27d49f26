"""Compiler of specexport: checkpoints in, bundles out. Importing this package imports nothing heavy."""
