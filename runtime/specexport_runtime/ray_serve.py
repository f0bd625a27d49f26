"""A bundle as a Ray Serve deployment: replicas, autoscaling, streaming (extra ``ray``)."""
