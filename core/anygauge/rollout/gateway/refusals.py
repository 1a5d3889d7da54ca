"""Error responses of both APIs."""

from __future__ import annotations

__all__ = ["Refusal", "bad_request", "no_room"]


class Refusal(Exception):
    """A request that is answered with an error.

    :param status: Status code of HTTP.
    :param parameter: Which field of the request is to blame.
    :param code: A word for programs, as OpenAI's API has them.
    :param retry_after_s: When another attempt may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.code = code
        self.retry_after_s = retry_after_s


def bad_request(message: str, parameter: str | None = None, code: str | None = None) -> Refusal:
    """Return the refusal of a request that is wrong in itself."""
    return Refusal(400, message, parameter=parameter, code=code)


def no_room(message: str) -> Refusal:
    """Return the refusal of a prompt that leaves no room for an answer."""
    return bad_request(message, "messages", "context_length_exceeded")
