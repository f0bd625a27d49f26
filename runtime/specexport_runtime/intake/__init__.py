"""From what a caller asks for to a sequence that can be decoded."""
