"""The custom ops of the traced model: their declarations, torch ops, ONNX schemas and plain references.

``spec`` declares each op once; ``torch_ops`` and ``onnx_op`` derive the rest from it; ``reference`` says in numpy what
it means. Importing this package imports none of torch and onnx.
"""

from specexport.ops.spec import UNPADDED_ATTENTION, OpAttribute, OpInput, OpSpec

__all__ = ["UNPADDED_ATTENTION", "OpAttribute", "OpInput", "OpSpec"]
