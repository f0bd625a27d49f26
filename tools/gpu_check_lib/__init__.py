"""The parts of ``tools/gpu_check.py``: what only a GPU can show, measured in isolated tasks."""
