"""Cost curves of a bundle that nobody has measured: the ratios that its sizes promise."""

import pytest

from specexport_runtime.abi import StateGeometry
from specexport_runtime.bundle.entry import ExpertSizes
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.costs.prior import prior_costs
from tests.support.cases.entries import changed


@pytest.fixture
def entries(demo_bundle):
    models = load_manifest(demo_bundle).models
    return {role: changed(entry, packed_bytes=None) for role, entry in models.items()}


def costs(entries, kernels="avx2"):
    return prior_costs(entries, kernels=kernels)


def test_a_draft_costs_by_its_size(entries):
    found = costs(entries)
    share = found.drafters["draft-model"].seconds(1, 1) / found.target.seconds(1, 1)
    sizes = entries["draft"].parameters.step / entries["target"].parameters.step
    assert 0.3 * sizes < share < 1
    assert share < 0.5


def test_quantized_weights_are_read_faster_and_make_tokens_dearer(entries):
    small = costs({"target": changed(entries["target"], quantize="int8", step=10**9)}).target
    large = costs({"target": changed(entries["target"], quantize=None, step=10**9)}).target
    assert small.seconds(1, 1) < 0.4 * large.seconds(1, 1)
    assert small.seconds(5, 1) / small.seconds(1, 1) > 1.05


@pytest.mark.parametrize(
    ("kernels", "quantize", "five", "nine", "eight_by_five"),
    [
        ("avx512vnni", "keep", 1.38, 1.73, 6.2),
        ("avx512vnni", "int8", 1.03, 1.1, 2.9),
        ("avx2", "keep", 1.56, 2.32, 11.7),
        ("avx2", "int8", 1.55, 2.25, 9.8),
    ],
)
def test_draft_tokens_cost_what_the_kernels_make_of_them(entries, kernels, quantize, five, nine, eight_by_five):
    """As measured on two cores: a model of 1.5 billion, kept (a Xeon) and in int8 (an EPYC; avx2 by products alone)."""
    count = 1_543_714_304
    stored = (980_000_000, 4 * count) if quantize == "keep" else None
    sizes = {"total": count, "step": count, "packed_bytes": stored, "quantize": quantize}
    target = costs({"target": changed(entries["target"], **sizes)}, kernels).target
    found = [target.seconds(tokens, rows) / target.seconds(1, 1) for tokens, rows in ((5, 1), (9, 1), (40, 8))]
    assert found == pytest.approx([five, nine, eight_by_five], rel=0.25)


def test_kept_weights_cost_what_their_formats_take(entries):
    kept = changed(entries["target"], quantize="keep", total=10**9, step=10**9)
    four, eight = (
        costs({"target": changed(kept, packed_bytes=(bits * 10**8, 32 * 10**8))}).target.seconds(1, 1)
        for bits in (5, 9)
    )
    assert 1.3 < eight / four < 9 / 5


def test_what_is_only_looked_up_costs_nothing(entries):
    target = changed(entries["target"], total=10**9, step=6 * 10**8)
    smaller, whole = changed(target, total=6 * 10**8), changed(target, step=10**9)
    ones = [costs({"target": entry}).target.seconds(1, 1) for entry in (target, smaller, whole)]
    assert ones[0] == ones[1] < 0.7 * ones[2]


@pytest.mark.parametrize("kernels", ["avx2", "avx512vnni", None])
def test_more_tokens_rows_and_entries_cost_more(entries, kernels):
    target = costs(entries, kernels).target
    assert target.seconds(1, 1) < target.seconds(5, 1) < target.seconds(9, 1)
    assert target.seconds(8, 8) == pytest.approx(target.seconds(8, 1))  # a token is a token
    grown = [target.seconds(tokens, 1, 1000) - target.seconds(tokens, 1, 10) for tokens in (1, 5)]
    assert grown[1] > 1.5 * grown[0] > 0


def test_draft_tokens_read_more_experts_until_all_are_read(entries):
    dense = changed(entries["target"], total=10**9, step=10**9)
    experts = changed(dense, experts=ExpertSizes(9 * 10**8, 4, 64))
    one, two, many = (costs({"target": experts}).target.seconds(count, 1) for count in (1, 2, 9))
    dense_one, dense_many = (costs({"target": dense}).target.seconds(count, 1) for count in (1, 9))
    assert one < 0.2 * dense_one, "a token reads 4 of 64 experts"
    assert many / one > 2 * dense_many / dense_one, "nine tokens read more experts than one"
    assert 0 < (many - two) / 7 < two - one, "some are read already"
    assert many < dense_many
    eight = costs({"target": experts}).target
    assert eight.seconds(8, 8) == pytest.approx(eight.seconds(8, 1), rel=0.1), "experts are shared by rows too"


def test_states_cost_by_their_size_and_by_the_row(entries):
    none = changed(entries["target"], total=10**8, step=10**8)
    some, more = (changed(none, states=(StateGeometry((16, 128, size), 4096),) * 12) for size in (64, 128))
    targets = [costs({"target": entry}).target for entry in (none, some, more)]
    ones, eights = ([target.seconds(count, count) for target in targets] for count in (1, 8))
    assert ones[0] < ones[1] < ones[2]
    assert eights[2] - eights[1] == pytest.approx(8 * (ones[2] - ones[1])), "each row has its own"
