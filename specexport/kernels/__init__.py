"""Triton kernels of the ``plugin`` lowering: KV append, ragged attention over an unpadded KV cache, split combination.

Import the modules inside functions: ``ragged_attention``, ``tiles`` and ``launch`` need Triton.
"""
