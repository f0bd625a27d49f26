"""The server answers over a real socket."""

from tests.support.cases import patience


def test_a_completion_over_a_socket(fake_served):
    answer = patience.post(f"{fake_served.url}/v1/completions", json={"prompt": "w1 w2", "max_tokens": 5})
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["text"].split()) == 5
    fake_served.wait_until_idle()


def test_the_demo_bundle_over_a_socket(demo_served):
    answer = patience.post(f"{demo_served.url}/v1/completions", json={"prompt": "def f(", "max_tokens": 5})
    assert answer.status_code == 200
    demo_served.wait_until_idle()
