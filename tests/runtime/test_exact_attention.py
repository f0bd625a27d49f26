"""ONNX Runtime's attention adds up as ``exact_width`` says: at each number of columns, on the real kernel."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from specexport_runtime.executors.exact_width import least_first_chunk, room_within
from specexport_runtime.executors.flash_attention import flash_attention
from specexport_runtime.executors.ort_session import open_session

onnx = pytest.importorskip("onnx")

CAPACITY = 420
HEADS, KV_HEADS = 2, 1
ROWS = 9
VARIABLE = "ORT_GQA_DISABLE_FLASH_ATTENTION"
Array = npt.NDArray[np.float32]


class Attention(NamedTuple):
    """One attention layer and a text's projections, all of them in its cache as well.

    Attributes:
        session: of ``GroupQueryAttention``.
        tokens: q, k and v of each token [L, (H + 2 Hkv) D].
        k_cache: [1, Hkv, L, D].
        v_cache: the same.
    """

    session: Any
    tokens: Array
    k_cache: Array
    v_cache: Array

    def step(self, start: int, stop: int) -> Array:
        """Outputs [stop - start, H D] of the tokens ``[start, stop)`` as one step; a lone one runs twice."""
        own = self.tokens[start:stop]
        if len(own) == 1:
            own = np.concatenate([own, own])
        total = start + len(own)
        feeds = {
            "qkv": own[None],
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "last": np.array([total - 1], np.int32),
            "total": np.array([total], np.int32),
        }
        output: Array = self.session.run(["output"], feeds)[0][0]
        return output[: stop - start]


def make_attention(folder: Path, head_size: int, *, window: int = -1, flash: bool = False) -> Attention:
    from onnx import TensorProto, helper

    width = (HEADS + 2 * KV_HEADS) * head_size
    cache = [1, KV_HEADS, CAPACITY, head_size]
    node = helper.make_node(
        "GroupQueryAttention",
        ["qkv", "", "", "k_cache", "v_cache", "last", "total"],
        ["output", "k_cache_out", "v_cache_out"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        local_window_size=window,
    )
    floats = [("qkv", [1, "Q", width]), ("k_cache", cache), ("v_cache", cache)]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in floats]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, [1]) for name in ("last", "total")]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    tokens = np.random.default_rng(0).standard_normal((CAPACITY, width), np.float32)
    k, v = tokens[:, HEADS * head_size :].reshape(1, CAPACITY, 2 * KV_HEADS, head_size).transpose(2, 0, 1, 3)
    session = open_session(folder / "model.onnx", 1, spin=False, flash=flash)
    return Attention(session, tokens, np.ascontiguousarray(k[:, None]), np.ascontiguousarray(v[:, None]))


@pytest.mark.parametrize("window", [-1, 37])
@pytest.mark.parametrize(
    ("head_size", "borders"),
    [(64, ()), (128, ()), (136, (64,)), (256, (64,)), (320, (32, 64)), (512, (32, 64)), (640, (16, 32, 64))],
)
def test_sums_change_at_the_borders_alone(
    head_size: int, borders: tuple[int, ...], window: int, tmp_path: Path
) -> None:
    attention = make_attention(tmp_path, head_size, window=window)
    changes = []
    for total in range(ROWS + 1, CAPACITY - 1):
        step = attention.step(total - ROWS, total)
        if not np.array_equal(step, attention.step(total - ROWS, total + 1)[:ROWS]):
            changes.append(total)
        assert np.array_equal(step[3:], attention.step(total - ROWS + 3, total)), total  # fewer rows, same entries
    assert tuple(changes) == borders


@pytest.mark.parametrize("head_size", [8, 64, 128])
def test_tiles_of_flash_attention_leave_no_token_of_an_even_row_alone(head_size: int, tmp_path: Path) -> None:
    attention = make_attention(tmp_path, head_size, flash=True)
    wanted = np.concatenate([attention.step(at, at + 1) for at in range(CAPACITY - 1)])
    for start in (0, 7):
        widths = [width for width in range(2, 300) if width <= 16 or width % 2 == 0]
        for stop in (start + width for width in widths):
            assert np.array_equal(attention.step(start, stop), wanted[start:stop]), (start, stop)


@pytest.mark.parametrize(("head_size", "borders"), [(256, (64,)), (512, (32, 64))])
def test_drafts_see_what_plain_decoding_sees(head_size: int, borders: tuple[int, ...], tmp_path: Path) -> None:
    attention = make_attention(tmp_path, head_size)
    plain = [attention.step(at, at + 1)[0] for at in range(CAPACITY - 1)]
    for length in range(1, CAPACITY - ROWS):
        within = room_within(borders, length, reads_prompt=False)
        stop = length + (ROWS - 1 if within is None else min(ROWS - 1, within))
        step = attention.step(length - 1, stop)
        assert np.array_equal(step, plain[length - 1 : stop]), length


@pytest.mark.parametrize(("head_size", "borders"), [(256, (64,)), (512, (32, 64))])
def test_prompts_see_the_same_however_they_are_cut(head_size: int, borders: tuple[int, ...], tmp_path: Path) -> None:
    attention = make_attention(tmp_path, head_size)
    for prompt in (*range(2, 70), 130, 200, 300):
        whole = attention.step(0, prompt)
        within = room_within(borders, prompt, reads_prompt=True)
        drafts = ROWS - 1 if within is None else min(ROWS - 1, within)
        assert np.array_equal(whole, attention.step(0, prompt + drafts)[:prompt]), prompt
        for cut in range(least_first_chunk(borders), prompt):
            parts = [attention.step(0, cut), attention.step(cut, prompt)]
            assert np.array_equal(whole, np.concatenate(parts)), (prompt, cut)


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_environment_stays_as_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, before)
    for allowed, inside in ((False, "1"), (True, before)):
        with flash_attention(allowed):
            assert os.environ.get(VARIABLE) == inside
        assert os.environ.get(VARIABLE) == before
    with pytest.raises(ValueError, match="cannot load"), flash_attention(False):
        raise ValueError("cannot load")
    assert os.environ.get(VARIABLE) == before
