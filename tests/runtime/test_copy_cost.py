"""Copying a prefix weighed against reading it: what is measured at load, and what follows."""

from itertools import chain

import pytest
from loop import CAPACITY, VOCAB, make_decoder, make_sequence, make_target, run

from specexport_runtime.costs.copy_cost import CopyCost, least_copied, measure_copy
from specexport_runtime.costs.step_cost import StepCost
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.sampling.params import SamplingParams

READING = StepCost(0.99, 0.01)
"""A token more takes 10 ms."""


def test_a_copy_is_measured_on_two_rows_that_are_left_empty():
    seconds = (5.0, 0.5, 3.0, 9.0, 8.4, 9.0)
    times = chain(*((0.0, taken) for taken in seconds))
    runners = [ModelRunner(make_target(rows=3)), ModelRunner(make_target(rows=3))]
    found = measure_copy(runners, clock=lambda: next(times))
    assert found.each == pytest.approx((8.4 - 0.5) / (CAPACITY - 1))  # the fastest of one entry, and of all
    assert found.seconds(1) == pytest.approx(0.5)
    for runner in runners:
        assert runner.executor.resident_bytes == runner.kv.num_committed == runner.kv.touched(0) == 0


def test_nothing_is_measured_where_nothing_can_be_copied():
    assert measure_copy([ModelRunner(FakeExecutor(VOCAB, 1, CAPACITY))]) is None
    assert measure_copy([]) is None
    assert least_copied(None, READING, 16, 80) == 16
    assert least_copied(CopyCost(1.0, 1.0), None, 16, 80) == 16


@pytest.mark.parametrize(
    ("copy", "least"),
    [
        (CopyCost(0.0, 1e-5), 16),
        (CopyCost(0.245, 0.0), 25),  # 24 tokens are read in 240 ms
        (CopyCost(0.245, 0.002), 31),
        (CopyCost(0.0, 0.02), 81),  # never
    ],
)
def test_a_prefix_is_copied_where_that_takes_less_time_than_reading_it(copy, least):
    assert least_copied(copy, READING, 16, 80) == least
    if least <= 80:
        assert copy.seconds(least) < READING.seconds(least + 1, 1) - READING.seconds(1, 1)
    if least > 16:
        assert copy.seconds(least - 1) >= READING.seconds(least, 1) - READING.seconds(1, 1)


def test_fewer_tokens_than_pay_are_read_and_those_in_the_own_row_are_not():
    decoder = make_decoder(make_target(4), None, 0, reuses_prefixes=True, least_copied=25)
    prompt = [i % VOCAB for i in range(40)]
    found = []
    for length in (24, 25):
        running = make_sequence(0, prompt, SamplingParams(max_tokens=20), scope="")
        decoder.add(running)
        decoder.step()
        late = make_sequence(1, [*prompt[:length], 16, 16, 16], SamplingParams(max_tokens=2), scope="")
        run(decoder, [late])  # the other runs in the first row
        found.append(late.stats.cached_tokens)
    alone = make_sequence(2, [*prompt[:20], 15, 15], SamplingParams(max_tokens=2), scope="")
    run(decoder, [alone])
    assert found == [0, 25]
    assert alone.stats.cached_tokens == 20
