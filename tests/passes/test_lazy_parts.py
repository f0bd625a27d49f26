"""Some rows of a weight that passes have changed, without making all of it."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specexport.channel_ranges import ChannelRanges
from specexport.checkpoint.load import load_checkpoint
from specexport.onnx_emit import can_slice_lazily, lazy_tensor, part_of
from specexport.passes.pipeline import default_passes
from specexport.passes.quantize_sites import channel_parts
from specexport.trace.check import trace_checkpoint
from tests.support.models.tiny_models import make_llama, save_checkpoint


@pytest.mark.parametrize("tied", [False, True])
def test_what_passes_make_of_a_weight_can_be_made_in_parts(tied: bool, tmp_path: Path) -> None:
    folder = save_checkpoint(make_llama(tie_word_embeddings=tied), tmp_path / "tiny")
    checkpoint = load_checkpoint(str(folder), stream=True)
    model = trace_checkpoint(checkpoint).ir_model.clone()
    generator = np.random.default_rng(0)
    ranges = {
        f"model.{name}": ChannelRanges(*generator.uniform(0.5, 20, (3, weight.shape[1])).astype(np.float32))
        for name, weight in checkpoint.stored.items()
    }
    ids = np.arange(5, 320, 3, dtype=np.int32)
    seen: set[str] = set()
    for item in default_passes("float32", pack=True, quantize="int8", head_ids=ids, ranges=ranges):
        if item.name == "int8-quantize":
            break
        item(model)
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if not isinstance(tensor, ir.LazyTensor) or len(tensor.shape) != 2:
                continue
            assert can_slice_lazily(tensor), name
            whole = tensor.numpy()
            for axis, start, stop in [(0, 0, 3), (0, 11, whole.shape[0]), (1, 5, 6), (1, 17, whole.shape[1] - 1)]:
                wanted = whole[start:stop] if axis == 0 else whole[:, start:stop]
                np.testing.assert_array_equal(part_of(tensor, axis, start, stop), wanted, err_msg=f"{name} {axis}")
            seen |= {ending for ending in (".transposed", ".cut", ".packed") if ending in name}
    assert seen == {".transposed", ".cut", ".packed"}


@pytest.mark.parametrize("turned", [False, True])
def test_channels_come_in_parts_whatever_the_tensor_is(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specexport.passes.quantize_sites._CHUNK", 100)
    array = np.arange(40 * 30, dtype=np.float32).reshape(40, 30)
    made = []

    def make() -> np.ndarray:
        made.append(1)
        return array

    lazy = lazy_tensor("w", "FLOAT", array.shape, make)
    for tensor in (ir.tensor(array), lazy):
        parts = list(channel_parts(tensor, turned))
        assert len(parts) > 5
        np.testing.assert_array_equal(np.concatenate(parts), array if turned else array.T)
    assert len(made) == 1  # one that has no parts is made once, not once for each part
