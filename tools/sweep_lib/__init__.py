"""The parts of ``tools/architecture_sweep.py``: every decoder that transformers has, tiny, built and compared."""
