"""Executors: what runs engines. They know nothing of models, sequences or drafting."""
