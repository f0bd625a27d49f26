"""From a loaded model to an ONNX graph of a packed step, or a reason why there is none."""
