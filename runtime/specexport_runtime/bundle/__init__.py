"""The bundle folder: its manifest, its files and their hashes, profiles, the tokenizer."""
