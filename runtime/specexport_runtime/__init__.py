"""Thin runtime of specexport: speculative decoding over a bundle. No torch, no transformers, no onnx.

from specexport_runtime import SamplingParams, SpecEngine

engine = SpecEngine.load("engines/demo")
print(engine.generate("def main():", SamplingParams(max_tokens=64))[0].text)
"""

import os

# ONNX Runtime's Linux and macOS packages report models and usage to Microsoft unless this is set before the first
# `import onnxruntime`. A program that wants them sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from typing import TYPE_CHECKING, Any

from specexport_runtime.engine import SpecEngine
from specexport_runtime.engine_options import EngineOptions
from specexport_runtime.errors import SpecexportError
from specexport_runtime.intake.conversation import Conversation
from specexport_runtime.requests.results import GenerationResult, StreamChunk, StreamPiece
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.structured import StructuredOutputs

if TYPE_CHECKING:
    from specexport_runtime.async_engine import AsyncRequest, AsyncSpecEngine

__all__ = [
    "AsyncRequest",
    "AsyncSpecEngine",
    "Conversation",
    "EngineOptions",
    "GenerationResult",
    "SamplingParams",
    "SpecEngine",
    "SpecexportError",
    "StreamChunk",
    "StreamPiece",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    """The asyncio classes, on first use: asyncio takes a fifth of the time that importing this package takes."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specexport_runtime import async_engine

    return getattr(async_engine, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
