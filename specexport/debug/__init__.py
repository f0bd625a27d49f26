"""``specexport debug``: one step of a decode through two graphs of a model, compared layer by layer."""
