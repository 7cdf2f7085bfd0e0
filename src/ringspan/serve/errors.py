"""What does a client get that cannot be served? An error in OpenAI's format."""

from typing import Any


class ApiError(Exception):
    """A request that is refused or failed.

    Args:
        message: What is wrong, without anything of the prompt.
        status: The HTTP status.
        code: A word for programs.
        param: The field that is wrong.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
