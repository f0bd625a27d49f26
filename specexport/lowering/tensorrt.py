"""Attention for TensorRT: its own operators, or the unpadded-KV plugin."""

from typing import TYPE_CHECKING

from specexport.passes.base import CountingPass

if TYPE_CHECKING:
    import onnx_ir as ir


class TrtAttentionPass(CountingPass):
    """Give every ``UnpaddedAttention`` node its body; ``forms`` has the form that each layer took, in order."""

    name = "attention-lower"
    reason = "TensorRT has attention of its own, or our kernels; adds token_ids"

    def __init__(
        self,
        *,
        kv_capacity: int,  # L, the entries of a cache row, which is fixed in the engine
        fold: int = 1,  # tokens of a verify step's row that are taken for heads; as in the profiles; not for the plugin
        plugin: bool = False,
    ) -> None:
        self._kv_capacity, self._fold, self._plugin = kv_capacity, fold, plugin
        self.forms: tuple[str, ...] = ()

    def rewrite(self, model: "ir.Model") -> int:
        """See the class; UnsupportedModelError names a layer that has no exact form."""
        if self._plugin:
            from specexport.lowering.trt_plugin import lower_trt_plugin

            self.forms = lower_trt_plugin(model, kv_capacity=self._kv_capacity)
        else:
            from specexport.lowering.trt_native import lower_trt_native

            self.forms = lower_trt_native(model, kv_capacity=self._kv_capacity, fold=self._fold)
        return len(self.forms)
