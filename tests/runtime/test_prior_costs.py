"""Cost curves of a bundle that nobody has measured: the ratios that its sizes promise."""

from dataclasses import replace

import pytest

from specexport_runtime.abi import StateGeometry
from specexport_runtime.bundle.manifest import ExpertSizes, load_manifest
from specexport_runtime.costs.prior import prior_costs


@pytest.fixture
def entries(demo_bundle):
    models = load_manifest(demo_bundle).models
    return {role: replace(entry, quantized_bytes=None) for role, entry in models.items()}


def costs(entries, *, on_gpu=False):
    return prior_costs(entries, on_gpu=on_gpu, max_rows=8, lookahead=8)


def test_a_draft_costs_by_its_size(entries):
    found = costs(entries)
    share = found.drafters["draft-model"].seconds(1, 1) / found.target.seconds(1, 1)
    sizes = entries["draft"].step_parameters / entries["target"].step_parameters
    assert 0.3 * sizes < share < 1
    assert share < 0.5


def test_quantized_weights_are_read_faster_and_make_tokens_dearer(entries):
    small = costs({"target": replace(entries["target"], quantize="int8", num_parameters=10**9)}).target
    large = costs({"target": replace(entries["target"], quantize=None, num_parameters=10**9)}).target
    assert small.seconds(1, 1) < 0.4 * large.seconds(1, 1)
    assert small.seconds(5, 1) / small.seconds(1, 1) > 1.05


def test_draft_tokens_are_dearer_without_int8_tiles(entries):
    models = {"target": replace(entries["target"], quantize="int8", num_parameters=10**9, step_parameters=10**9)}
    tiles, none = (
        prior_costs(models, on_gpu=False, max_rows=8, lookahead=8, int8_tiles=has).target for has in (True, False)
    )
    extra = [cost.seconds(5, 1) / cost.seconds(1, 1) - 1 for cost in (tiles, none)]
    assert 1.8 < extra[1] / extra[0] < 2.6
    assert 0.2 < extra[1] < 0.45, "0.28 on two cores of an EPYC, a model of 1.5 billion"


def test_kept_weights_cost_what_their_formats_take(entries):
    kept = replace(entries["target"], quantize="keep", num_parameters=10**9, step_parameters=10**9)
    four, eight = (
        costs({"target": replace(kept, quantized_bytes=(bits * 10**8, 32 * 10**8))}).target.seconds(1, 1)
        for bits in (5, 9)
    )
    assert 1.3 < eight / four < 9 / 5


@pytest.mark.parametrize("on_gpu", [False, True])
def test_more_tokens_rows_and_entries_cost_more(entries, on_gpu):
    target = costs(entries, on_gpu=on_gpu).target
    assert target.seconds(1, 1) < target.seconds(5, 1) < target.seconds(9, 1)
    assert target.seconds(8, 8) == pytest.approx(target.seconds(8, 1))  # a token is a token
    assert target.seconds(1, 1, 1000) > target.seconds(1, 1, 10)


def test_a_target_of_fixed_layers_prices_its_own_drafts(entries):
    fixed = replace(entries["target"], skipped_layers=(2, 5))
    found = costs({"target": fixed})
    assert 0.5 < found.drafters["self"].seconds(1, 1) / found.target.seconds(1, 1) < 1
    assert not costs({"target": entries["target"]}).drafters


def test_what_is_only_looked_up_costs_nothing(entries):
    target = replace(entries["target"], num_parameters=10**9, step_parameters=6 * 10**8)
    smaller = replace(target, num_parameters=6 * 10**8)
    older = replace(target, step_parameters=None)
    ones = [costs({"target": entry}).target.seconds(1, 1) for entry in (target, smaller, older)]
    assert ones[0] == ones[1] < 0.7 * ones[2]


def test_each_head_reads_the_keys_of_its_group_on_a_cpu_only(entries):
    few, many = (replace(entries["target"], num_heads=heads) for heads in (1, 24))

    def entry_seconds(entry, *, on_gpu):
        target = costs({"target": entry}, on_gpu=on_gpu).target
        return target.seconds(1, 1, 1000) - target.seconds(1, 1, 0)

    on_cpu, on_gpu = (entry_seconds(many, on_gpu=gpu) / entry_seconds(few, on_gpu=gpu) for gpu in (False, True))
    assert on_cpu > 3
    assert on_gpu < on_cpu / 2


def test_more_tokens_of_a_row_multiply_with_its_cache(entries):
    target = costs(entries).target
    grown = [target.seconds(tokens, 1, 1000) - target.seconds(tokens, 1, 0) for tokens in (1, 5)]
    assert grown[1] > 1.5 * grown[0]


def test_draft_tokens_read_more_experts_until_all_are_read(entries):
    dense = replace(entries["target"], num_parameters=10**9, step_parameters=10**9)
    experts = replace(dense, experts=ExpertSizes(9 * 10**8, 4, 64))
    one, two, many = (costs({"target": experts}).target.seconds(count, 1) for count in (1, 2, 9))
    dense_one, dense_many = (costs({"target": dense}).target.seconds(count, 1) for count in (1, 9))
    assert one < 0.2 * dense_one, "a token reads 4 of 64 experts"
    assert many / one > 2 * dense_many / dense_one, "nine tokens read more experts than one"
    assert 0 < (many - two) / 7 < two - one, "some are read already"
    assert many < dense_many
    eight = costs({"target": experts}).target
    assert eight.seconds(8, 8) == pytest.approx(eight.seconds(8, 1), rel=0.1), "experts are shared by rows too"


def test_states_cost_by_their_size_and_by_the_row(entries):
    none = replace(entries["target"], num_parameters=10**8, step_parameters=10**8)
    some, more = (replace(none, states=(StateGeometry((16, 128, size), 4096),) * 12) for size in (64, 128))
    ones, eights = zip(
        *(
            (cost.seconds(1, 1), cost.seconds(8, 8))
            for cost in (costs({"target": entry}).target for entry in (none, some, more))
        ),
        strict=True,
    )
    assert ones[0] < ones[1] < ones[2]
    assert eights[2] - eights[1] == pytest.approx(8 * (ones[2] - ones[1])), "each row has its own"
