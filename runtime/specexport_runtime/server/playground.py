"""The page at ``/``: static files of this package, nothing from elsewhere."""

from fastapi import APIRouter

router = APIRouter()
