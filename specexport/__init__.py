"""Compiler of specexport: checkpoints in, bundles out. The runtime is the package ``specexport_runtime``.

Importing this package imports nothing heavy; :func:`specexport.compile.pipeline.build_bundle` is where the work begins.
"""
