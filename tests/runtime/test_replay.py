"""The controller on recorded rounds: beside plain decoding and the best fixed length, quiet and disturbed."""

import pytest

from tests.support.fakes.replay import MACHINES, controller_of, lives, recorded, replay

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


@pytest.mark.parametrize("prompt", [20, 100])
@pytest.mark.parametrize("kernels", MACHINES)
def test_forty_short_answers_of_ten_processes_get_what_a_draft_gives_and_a_useless_one_costs_little(kernels, prompt):
    """Three processes on a loud machine, seven on a quiet one, of four answers each, with what is kept between them."""
    for domain, kept in recorded().items():
        found = lives([text[i : i + 48] for text in kept for i in (0, 32)], MACHINES[kernels], prompt=prompt, loud=3)
        for part in (found[:3], found[3:]):
            seconds, plain, best = (sum(each) for each in zip(*part, strict=True))
            gain = plain / best
            assert best / seconds > (0.95 if gain > 1.06 or gain == 1 else 0.94), (domain, gain)
            assert plain / seconds > 0.97, domain
        assert plain / seconds > 0.985, domain  # in the end trials cost that much at most
