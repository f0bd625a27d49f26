"""The decoding loop: scheduling, drafting, verifying, committing, and the thread that runs it."""
