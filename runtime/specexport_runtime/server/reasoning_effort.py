"""How much a model is to think: a variable of the chat template, or refused where the template reads none."""

from collections.abc import Mapping
from typing import Any

from specexport_runtime.requests.chat import template_variables
from specexport_runtime.server.errors import unsupported
from specexport_runtime.server.protocol import Effort


def template_arguments(template: str, effort: Effort | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables of a chat template that a body names, its effort among them; a given one goes before the effort.

    ``effort`` None leaves it to the template; ``ApiError`` 400 if the template does not read one.
    """
    names = template_variables(template)
    if effort is None:
        own: dict[str, Any] = {}
    elif "reasoning_effort" in names:
        own = {"reasoning_effort": effort}
    elif effort != "none":
        raise unsupported(
            "reasoning_effort", f"reasoning_effort = {effort!r}: the chat template reads no effort. Leave it out."
        )
    else:
        own = {"enable_thinking": False} if "enable_thinking" in names else {}
    return own | dict(given or {})
