"""An OpenAI-compatible server of one bundle (extra ``serve``, which ``config`` and this module do not import)."""
