"""The page at ``/`` of ``specexport serve``: an annex that the server mounts (`server/page.py`)."""
