"""Triton kernels of the ``plugin`` lowering: KV append, ragged attention over an unpadded KV cache, split combination.

Import the modules inside functions: ``kv_append``, ``ragged_attention``, ``combine``, ``tiles`` and ``launch`` need
Triton. ``signatures``, ``spec``, ``tuning`` and ``ptx`` need nothing but the standard library.
"""
