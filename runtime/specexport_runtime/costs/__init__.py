"""What steps cost on this machine, measured and remembered."""
