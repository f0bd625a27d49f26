"""``specexport chat``: a conversation in the terminal."""
