"""From a checkpoint to a text in one command: bundles that are built into the user's cache, and found there again."""
