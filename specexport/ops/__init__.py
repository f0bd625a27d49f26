"""The one custom op of the traced model: its declaration, its torch op, its ONNX schema and its plain reference.

``spec`` declares the op once; ``torch_op`` and ``onnx_op`` derive the rest from it; ``reference`` says in numpy what it
means. Importing this package imports none of torch and onnx.
"""

from specexport.ops.spec import UNPADDED_ATTENTION, OpAttribute, OpInput, OpSpec

__all__ = ["UNPADDED_ATTENTION", "OpAttribute", "OpInput", "OpSpec"]
