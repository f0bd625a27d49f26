"""How families of models write calls of functions."""
