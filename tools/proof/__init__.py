"""A proof engine: the graph of the ``plugin`` lowering run by torch and our Triton kernels, after the executor's seam.

It stands in for a TensorRT engine where there is none, so that the executor, its profiles, CUDA graphs, packing and the
decoding loop run on any NVIDIA GPU. It is a tool of this repository and ships with nothing.
"""
