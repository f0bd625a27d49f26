"""Verifying in 16 bits: a model that transformers computes in them passes, and mistakes that are larger do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.rounding import UNIT_ROUNDOFF, logit_tolerance
from specexport.verify.checkpoint import EagerModel, eager_references, widen_weights
from specexport.verify.logits import check_neighbours, check_tensors, make_sequences
from specexport.verify.tolerance import step_tolerance, text_limits
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors.fake import FakeExecutor
from tests.support.fakes.verify_fakes import PROMPTS

DTYPES = ("float16", "bfloat16")
TEXTS = [[265, 300, 411, 17, 1200, 873, 90, 3000], [5, 77, 4001, 2222, 361]]
LOOKAHEAD = 2
LENGTH = 40


class EagerExecutor(FakeExecutor):
    """An engine that is the checkpoint in transformers, in its dtype; ``shift`` moves the position of one token."""

    def __init__(self, model: Any, *, shift: int = 0) -> None:
        super().__init__(model.config.vocab_size, 4, 2 * LENGTH)
        self.model, self.shift = model, shift

    def logits_after(self, tokens: Any, mask: Any = None) -> Any:
        import torch

        positions = torch.arange(len(tokens))
        if len(tokens) % 8 == 0:
            positions[-1] += self.shift
        with torch.no_grad():
            found = self.model(torch.tensor([[int(token) for token in tokens]]), position_ids=positions[None])
        return found.logits[0, -1].float().numpy()


def load(folder: Path, dtype: str) -> Any:
    from specexport.checkpoint.load import load_checkpoint

    return load_checkpoint(str(folder), dtype=dtype).model


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_transformers_computes_in_16_bits_passes_and_a_position_off_by_one_fails(demo_pair, dtype):
    model = load(demo_pair / "draft", dtype)
    sequences = make_sequences(TEXTS, model.config.vocab_size, lookahead=LOOKAHEAD, max_model_len=LENGTH, num_rows=2)
    references = eager_references(EagerModel(str(demo_pair / "draft"), dtype), sequences)

    def check(shift: int) -> Any:
        return check_tensors(
            "target", EagerExecutor(model, shift=shift), sequences, references, lookahead=LOOKAHEAD, dtype=dtype,
            num_layers=model.config.num_hidden_layers,
        )  # fmt: skip

    found = check(0)
    assert found.passed
    assert found.tolerance / 6 < found.max_relative, "the limit is no more than a few times what rounding does"
    assert max(case.max_rms for case in found.cases) > found.rms_tolerance / 6
    tolerance = step_tolerance("ort-cuda", dtype, 2)
    assert tolerance == found.tolerance
    assert check_neighbours(
        "target", EagerExecutor(model), [*TEXTS, *TEXTS], lookahead=LOOKAHEAD, tolerance=tolerance
    ).passed
    wrong = check(1)
    assert not wrong.passed
    assert {"prefill", "ragged"} <= {case.name for case in wrong.cases if not case.passed}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_has_the_engines_weights_and_float32_arithmetic(demo_pair: Path, dtype: str) -> None:
    import torch

    model, exact = load(demo_pair / "draft", dtype), load(demo_pair / "draft", "float32")
    wanted = {name: value.to(getattr(torch, dtype)).float() for name, value in exact.named_parameters()}
    widen_weights(model)
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, wanted[name]), name


def test_the_tolerance_grows_with_the_roundoff_and_the_root_of_the_depth() -> None:
    for dtype, unit in UNIT_ROUNDOFF.items():
        assert np.finfo("float16").eps / 2 == UNIT_ROUNDOFF["float16"]
        assert logit_tolerance(dtype, 16).rms == pytest.approx(4 * unit)
        assert logit_tolerance(dtype, 16).largest == pytest.approx(16 * unit)
        assert logit_tolerance(dtype, 64).largest == pytest.approx(2 * logit_tolerance(dtype, 16).largest)
        assert step_tolerance("tensorrt", dtype, 16) == logit_tolerance(dtype, 16).largest
        assert text_limits("int8", dtype, 16).perplexity == text_limits("int8", "float32", 16).perplexity + 4 * unit
    assert logit_tolerance("float32", 2) == logit_tolerance("float32", 64)
    with pytest.raises(IncompatibleError, match="float8"):
        step_tolerance("ort-cuda", "float8", 2)
    assert step_tolerance("ort-cpu", "float32", 16) == 0


def test_a_row_that_is_wrong_everywhere_fails_even_if_no_logit_is_far_off() -> None:
    """What one wrong entry of a long cache does: little to each logit, but to all of them."""
    size, layers = 23, 16
    right = FakeExecutor(size, 4, 140)

    class Shifted(FakeExecutor):
        offset = 0.0

        def logits_after(self, tokens: Any, mask: Any = None) -> Any:
            logits = super().logits_after(tokens, mask)
            signs = np.where(np.arange(size) % 2, 1, -1).astype(np.float32)
            return logits + signs * np.float32(self.offset * max(1.0, np.abs(logits).max()))

    sequences = make_sequences(PROMPTS, size, lookahead=2, max_model_len=64)
    references = [np.stack([right.logits_after(ids[: i + 1]) for i in range(len(ids))]) for ids in sequences]
    limits = logit_tolerance("float16", layers)
    for offset, passed in ((limits.rms / 3, True), (limits.largest / 2, False)):
        wrong = Shifted(size, 4, 140)
        wrong.offset = offset
        found = check_tensors("target", wrong, sequences, references, lookahead=2, dtype="float16", num_layers=layers)
        assert found.max_relative < limits.largest
        assert found.passed == passed
