"""Tiles of ``ragged_attention`` that ran fastest on a GPU. Commit d597d3e has the script that wrote it."""

MEASURED: dict[tuple[int, int, int, bool], tuple[int, int, int]] = {
    (90, 128, 32, True): (64, 4, 2),
}
"""(block_n, num_warps, num_stages) by (architecture, padded head size, block_m, whether 48 KiB are the most)."""

SOURCES: dict[int, str] = {
    90: "NVIDIA H200, 2026-11-26 01:44 UTC",
}
"""Which GPU was measured, and when, by architecture."""
