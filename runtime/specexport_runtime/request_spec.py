"""A request before it is checked: what ``SpecEngine.submit_all`` and ``AsyncSpecEngine`` take."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specexport_runtime.results import Prompt
from specexport_runtime.sampling import SamplingParams


class RequestSpec(NamedTuple):
    """One request.

    Attributes:
        prompt: a text or token ids.
        params: sampling parameters.
        reference: a text or token ids that lookup may copy from.
        drafting: how to draft; see ``requests.Drafting``.
    """

    prompt: Prompt
    params: SamplingParams = SamplingParams()
    reference: Prompt | None = None
    drafting: Mapping[str, Any] = {}
