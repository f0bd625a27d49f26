"""What the parts of a chat are called in another API, whose requests are planned as chats."""

from specexport_runtime.server.errors import ApiError


class ChatNames(dict[str, str]):
    """From names in the body of a chat to those in the request that it was made of."""

    def translate(self, error: ApiError) -> ApiError:
        """The error of the chat in the words of the request."""
        param, message = error.param or "", error.message
        if param == "structured_outputs":
            message = message.replace("response_format", self["response_format"])
        for name in sorted(self, key=len, reverse=True):  # a name may be a part of another
            if param.startswith(name) and param[len(name) : len(name) + 1] in ("", ".", "["):
                own = self[name]
                param, message = param.replace(name, own, 1), message.replace(name, own, 1)
                break
        return ApiError(
            error.status, message, kind=error.kind, param=param or None, code=error.code, headers=error.headers
        )
