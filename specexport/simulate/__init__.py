"""What padding costs a batch, and what speculation gains, from an acceptance model alone."""
