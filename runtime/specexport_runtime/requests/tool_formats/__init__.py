"""How families of models write calls of functions: one format a file."""
