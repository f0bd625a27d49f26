"""Proof that a bundle decodes losslessly: three parts, each usable alone, and the report that the bundle keeps.

=============  ==================================================================================
``tensors``    the engines' logits against eager transformers, at every step shape of a round
``greedy``     speculative greedy output against plain greedy output, token for token
``sampling``   speculative sampled output against the target's exact distribution
=============  ==================================================================================

Only ``tensors`` needs the checkpoints, torch and transformers; importing this package imports none of them.
"""
