"""The stages of a build, from checkpoints to a bundle."""
