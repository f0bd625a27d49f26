"""Section operators: graphs and arrays against what ONNX Runtime takes on a CPU."""

import json
import subprocess
from typing import Any

import numpy as np
import pytest

from specexport_runtime.executors.paged import BLOCK_ENTRIES
from tools.gpu_check_lib import operators, registry
from tools.gpu_check_lib.context import Context
from tools.gpu_check_lib.operators import OURS, WAYS, Geometry, Timing, Way, error_of, make_model, make_step
from tools.gpu_check_lib.rows import Row, read_rows

SIZES = Geometry(8, 2, 16)


def rows_of(context: Context) -> dict[str, Row]:
    return {row.what: row for row in read_rows(context.recorder.path)}


# graphs and arrays


@pytest.mark.parametrize(("past", "new"), [(7, 1), (40, 5)])
def test_grouped_attention_computes_what_is_called_right(past: int, new: int) -> None:
    import onnxruntime

    way = Way("GroupQueryAttention", "float32")
    model = make_model(way, SIZES, dtype="float32", layers=2)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    step = make_step(way, SIZES, past, new, dtype="float32")
    feeds = step.inputs | {
        f"{kind}_cache.{i}": each for i in range(2) for kind, each in zip("kv", step.caches, strict=True)
    }
    (output,) = session.run(["output.0"], feeds)
    assert error_of(output[0], step.right) <= operators.TOLERANCES["float32"]
    assert error_of(output[0][::-1], step.right) > 0.1 or new == 1, "the tolerance tells tokens apart"


ON_A_CPU = ("float16", "int8")  # caches for which the CPU's GroupQueryAttention has a kernel


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_onnxruntime_accepts_every_graph_up_to_its_gpu_kernels(way: Way) -> None:
    import onnxruntime

    model = make_model(way, SIZES, layers=1).SerializeToString()
    if way.operator == "GroupQueryAttention" and way.cache in ON_A_CPU:
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        step = make_step(way, SIZES, 40, 5)
        caches = {f"{kind}_cache.0": each for kind, each in zip("kv", step.caches, strict=True)}
        (output,) = session.run(["output.0"], step.inputs | caches)
        assert error_of(output[0].astype(np.float32), step.right) <= operators.TOLERANCES[way.cache]
        return
    refused = "NOT_IMPLEMENTED|Could not find an implementation|InsertedPrecisionFreeCast"
    with pytest.raises(Exception, match=refused) as error:
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert way.operator.replace("rows", "PagedAttention") in str(error.value)


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("operator", ["PagedAttention", "rows"])
def test_blocks_hold_the_past_and_have_room_for_the_step(operator: str, new: int) -> None:
    past = 2 * BLOCK_ENTRIES - 3
    step, plain = (make_step(Way(name), SIZES, past, new) for name in (operator, "GroupQueryAttention"))
    total = past + new
    given = step.inputs
    rows = new if operator == "rows" else 1
    assert given["cu_new_tokens"].tolist() == np.linspace(0, new, rows + 1).tolist()
    assert (given["past_lens"] + np.diff(given["cu_new_tokens"])).tolist() == list(range(total - rows + 1, total + 1))
    assert given["metadata"].tolist() == [new // rows, total, total]
    for kind, cache in zip(("key", "value"), step.caches, strict=True):
        contiguous = plain.caches[("key", "value").index(kind)][0].swapaxes(0, 1)
        for table in given["block_table"]:
            entries = cache[table].reshape(-1, SIZES.kv_heads, SIZES.head_size)
            assert len(entries) >= total
            np.testing.assert_array_equal(entries[:past], contiguous[:past])
            assert not entries[past:].any()
    np.testing.assert_array_equal(step.right, plain.right)


@pytest.mark.parametrize("cache", ["int8", "float8e4m3fn"])
def test_a_quantized_cache_is_near_and_not_equal(cache: str) -> None:
    quantized, plain = (make_step(Way("PagedAttention", kind), SIZES, 300, 5) for kind in (cache, "float16"))
    assert quantized.caches[0].itemsize == 1
    assert 1e-4 < error_of(quantized.right, plain.right) < 2 * operators.TOLERANCES[cache]


# ways in their own processes


def printed(error: float = 1e-3, microseconds: float = 10.0) -> str:
    timings = [Timing(past, new, microseconds * new, error, "", "recorded") for past, new in operators.sizes()]
    kernels = [f"Operator=X SdpaKernel={'CUDNN' if new == 1 else 'FLASH'}" for _, new in operators.sizes()]
    lines = [line for line in kernels for _ in range(operators.NUM_LAYERS)]
    return "\n".join([*lines, operators.RESULT + json.dumps(timings)])


def test_a_way_that_crashes_hangs_or_is_wrong_costs_its_own_row(
    monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    context.seconds = 1000.0
    asked: list[str] = []

    def run(command: list[str], *, env: dict[str, str], timeout: float, **_: Any) -> Any:
        way = operators.find_way(command[-1])
        asked.append(env[operators.CUDNN])
        done = subprocess.CompletedProcess(command, 0, printed(), "")
        if way.operator == "rows":
            raise subprocess.TimeoutExpired(command, timeout)
        if way.cache == "float8e4m3fn":
            done.returncode = -11
        elif way.cache == "int8":
            done.stdout = printed(error=float("nan"))
        elif way == Way("GroupQueryAttention", cudnn=False):
            done.stdout, done.returncode = "Fail: no kernel for this", 1
        return done

    monkeypatch.setattr(operators.subprocess, "run", run)
    monkeypatch.setattr(operators, "measure_ours", lambda: [
        Timing(past, new, 9.0, 1e-3, "ours", "recorded") for past, new in operators.sizes()
    ])  # fmt: skip
    operators.measure_operators(context)
    assert asked == [str(int(way.cudnn)) for way in WAYS]
    verdicts = {what: row.verdict for what, row in rows_of(context).items()}
    assert len(verdicts) == len(WAYS) + 1
    good = {OURS, Way("PagedAttention").name, Way("PagedAttention", cudnn=False).name, Way("GroupQueryAttention").name}
    assert {what for what, verdict in verdicts.items() if verdict == "ok"} == good
    assert verdicts[Way("PagedAttention", "int8").name] == "missed"
    assert {verdicts[way.name] for way in WAYS if way.operator == "rows"} == {"failed"}
    value = rows_of(context)[Way("PagedAttention").name].value
    assert "8192: 10.0 and 50.0 us (5.00x)" in value
    assert "kernels CUDNN, FLASH" in value


def test_operators_are_asked_for_where_ort_cuda_is() -> None:
    names = {backend: {task.name for task in registry.list_tasks((backend,))} for backend in ("ort-cuda", "tensorrt")}
    assert "operators.measure" in names["ort-cuda"]
    assert not [name for name in names["tensorrt"] if name.startswith("operators")]
