"""Sampling parameters of every kind."""

DISTRIBUTIONS = [
    {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"top_k": 12, "top_p": 0.8}, {"min_p": 0.02, "top_p": 0.6},
    {"min_p": 0.01, "top_k": 5, "top_p": 0.9}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0},
]  # fmt: skip
