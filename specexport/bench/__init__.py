"""``specexport bench``: every method of decoding a bundle, side by side, through the runtime's public API."""
