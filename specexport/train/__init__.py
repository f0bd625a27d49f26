"""Training a draft head for a target, on text that the target writes: ``specexport train-draft``."""
