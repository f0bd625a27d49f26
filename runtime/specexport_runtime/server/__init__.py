"""An OpenAI-compatible server of one bundle (extra ``serve``).

``config``, ``command`` and this module import nothing of the extra; everything else here may.
"""
