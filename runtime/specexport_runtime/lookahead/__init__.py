"""How far to draft: lengths chosen by what they are expected to give and to cost."""
