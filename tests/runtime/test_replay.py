"""The controller on recorded rounds: beside plain decoding and the best fixed length, quiet and disturbed."""

import pytest

from tests.support.fakes.replay import MACHINES, controller_of, recorded, replay

FIXED = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize("disturbed", [False, True], ids=["quiet", "disturbed"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kernels", MACHINES)
def test_no_choice_beats_the_controller_by_much_and_plain_decoding_by_next_to_nothing(kernels, rows, disturbed):
    machine = MACHINES[kernels]
    for domain, kept in recorded().items():
        texts = [kept[i % len(kept)] for i in range(max(rows, len(kept)))]
        plain, *fixed = (replay(texts, machine.real, k, rows=rows, disturbed=disturbed) for k in (0, *FIXED))
        controller = controller_of(machine.told)
        for least in (0.93, 0.97):  # who meets a drafter first reads one prompt of these two with it
            seconds = replay(texts, machine.real, controller, rows=rows, disturbed=disturbed)
            assert plain / seconds > least, domain
            assert min(fixed) / seconds > 0.92, domain


@pytest.mark.parametrize(("domain", "least"), [("code", 1.25), ("math", 1.25)])
def test_good_drafts_are_used_where_they_cost_little(domain, least):
    machine, texts = MACHINES["avx512vnni"], recorded()[domain]
    seconds = replay(texts, machine.real, controller_of(machine.told))
    assert replay(texts, machine.real, 0) / seconds > least


def test_a_controller_that_always_drafts_would_be_noticed():
    machine = MACHINES["avx2"]
    for texts in recorded().values():
        assert replay(texts, machine.real, 0) / replay(texts, machine.real, 8) < 0.96
