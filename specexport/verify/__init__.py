"""Proof that a bundle decodes losslessly: parts, each usable alone, and the report that the bundle keeps.

==============  ==================================================================================
``tensors``     logits of float engines against eager transformers, at every step shape of a round
``perplexity``  of engines with quantized weights or caches: their perplexity on a text against the float model's
``neighbours``  a token's logits beside others in a step against those of the same token alone
``greedy``      speculative greedy output against plain greedy output, token for token
``sampling``    speculative sampled output against the target's exact distribution
==============  ==================================================================================

Only ``tensors`` and, without a reference bundle, ``perplexity`` need the checkpoints, torch and transformers; importing
this package imports none of them.
"""
