"""From logits to tokens: parameters, distributions, random numbers, acceptance."""
