"""Thin runtime of specexport: speculative decoding over a bundle. No torch, no transformers, no onnx.

from specexport_runtime import SamplingParams, SpecEngine

engine = SpecEngine.load("engines/demo")
print(engine.generate("def main():", SamplingParams(max_tokens=64))[0].text)
"""

from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import SpecexportError
from specexport_runtime.results import GenerationResult, StreamChunk, StreamPiece
from specexport_runtime.sampling import SamplingParams

__all__ = ["GenerationResult", "SamplingParams", "SpecEngine", "SpecexportError", "StreamChunk", "StreamPiece"]
