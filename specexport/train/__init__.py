"""Training a draft, a head or a smaller model, on text that its target writes: ``specexport train-draft``."""
