"""The unpadded-KV attention plugin for TensorRT: kernels that are compiled ahead of time and embedded in the engine.

``naming`` puts everything a kernel is compiled for into the plugin's name, ``definitions`` registers the plugins that a
graph names. The graph is made by ``specexport.lowering.trt_plugin``. Importing this package imports nothing heavy.
"""
