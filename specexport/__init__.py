"""Compiler of specexport: checkpoints in, bundles out. The runtime is the package ``specexport_runtime``.

Importing this package imports nothing heavy; :func:`specexport.build.pipeline.build_bundle` is where the work begins.
"""
