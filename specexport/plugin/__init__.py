"""The unpadded-KV attention plugin for TensorRT: kernels that are compiled ahead of time and embedded in the engine."""
