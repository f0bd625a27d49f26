"""``specexport explain``: what speculation did for one prompt, round by round, and what it saved."""
