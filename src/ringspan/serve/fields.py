"""What does a request ask for? Every field of its body is used, harmless as it is, or refused with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringspan.serve.errors import ApiError

Body = Mapping[str, Any]

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool")

_COMMON = {"model", "stream", "stream_options", "stop", "max_tokens", "temperature", "top_p", "seed"}
_CHAT = _COMMON | {"messages", "tools", "max_completion_tokens", "logprobs", "top_logprobs"}
_COMPLETION = _COMMON | {"prompt", "logprobs"}
# Values of known fields that ask for nothing beyond what happens anyway. None always does.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
    "verbosity": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "max_completion_tokens": (),
    "top_logprobs": (),
}
_ABOUT_THE_CALLER = {"user", "metadata", "safety_identifier", "prompt_cache_key"}


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options of an answer. `max_tokens` None: the server decides; `top_logprobs` None: none are returned."""

    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    top_logprobs: int | None


def chat_wishes(body: Body) -> Wishes:
    """The options of a chat completion."""
    _check_names(body, _CHAT)
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wants_logprobs = _flag(body, "logprobs")
    top = _whole(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants_logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return _wishes(body, _whole(body, name, 1, 2**31), (top or 0) if wants_logprobs else None)


def completion_wishes(body: Body) -> Wishes:
    """The options of a plain completion; 16 tokens by default."""
    _check_names(body, _COMPLETION)
    max_tokens = _whole(body, "max_tokens", 1, 2**31)
    return _wishes(body, 16 if max_tokens is None else max_tokens, _whole(body, "logprobs", 0, MAX_TOP_LOGPROBS))


def read_prompt(body: Body) -> str:
    """The prompt of a plain completion."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        raise ApiError("prompt: lists of prompts or tokens are not supported; send one string", param="prompt")
    return _text(prompt, "prompt")


def read_messages(body: Body) -> list[dict[str, Any]]:
    """The messages of a chat, with contents as text."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise ApiError(f"messages: expected a list of 1 to {MAX_MESSAGES} messages", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_tools(body: Body) -> list[dict[str, Any]] | None:
    """The tools for the chat template."""
    tools = body.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
        for tool in tools
    ):
        raise ApiError('tools: expected a list of {"type": "function", "function": {…}}', param="tools")
    return None if body.get("tool_choice") == "none" else tools or None


def _check_names(body: Body, used: set[str]) -> None:
    for name, value in body.items():
        if name in used or value is None:
            continue
        if name in _HARMLESS:
            # In Python True equals 1.
            if not any(
                value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
                for harmless in _HARMLESS[name]
            ):
                raise ApiError(f"{name}: this value is not supported here; leave the field out", param=name)
        elif name not in _ABOUT_THE_CALLER:
            raise ApiError(f"unknown field {name[:100]!a}; leave it out", param=name[:100])


def _wishes(body: Body, max_tokens: int | None, top_logprobs: int | None) -> Wishes:
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not stream:
            raise ApiError("stream_options needs stream to be true", param="stream_options")
        if not isinstance(options, dict) or options.keys() - {"include_usage"}:
            raise ApiError("stream_options: only include_usage is supported", param="stream_options")
    temperature, top_p = _number(body, "temperature", 0, 2), _number(body, "top_p", 0, 1)
    return Wishes(
        stream,
        _flag(options or {}, "include_usage"),
        _stops(body),
        max_tokens,
        1.0 if temperature is None else temperature,
        1.0 if top_p is None else top_p,
        _whole(body, "seed", -(2**63), 2**63 - 1),
        top_logprobs,
    )


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError(f"{where}: expected an object", param=where)
    unknown = message.keys() - {"role", "content", "name", "tool_calls", "tool_call_id", "refusal"}
    if unknown:
        raise ApiError(f"{where}: unknown field {min(unknown)[:100]!a}", param=where)
    if message.get("role") not in ROLES:
        raise ApiError(f"{where}.role: expected one of {', '.join(ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ApiError(f"{where}.content: expected text", param=f"{where}.content")
    given = {name: value for name, value in message.items() if value is not None}
    return given | {"content": "" if content is None else _content(content, f"{where}.content")}


def _content(content: object, where: str) -> str:
    if not isinstance(content, list):
        return _text(content, where)
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ApiError(f"{where}: only parts of type text are supported", param=where)
        parts.append(_text(part.get("text"), where))
    return "".join(parts)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ApiError(f"{where}: expected text", param=where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ApiError(f"{where}: half of a surrogate pair is not text", param=where) from None
    return value


def _stops(body: Body) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(each, str) and 0 < len(each) <= MAX_STOP_CHARACTERS for each in stops)
    ):
        rule = f"stop: expected up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
        raise ApiError(rule, param="stop")
    return tuple(stops)


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name}: expected true or false", param=name)
    return bool(value)


def _number(body: Body, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ApiError(f"{name}: expected a number from {low} to {high}", param=name)
    return float(value)


def _whole(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(f"{name}: expected a whole number from {low} to {high}", param=name)
    return int(value)
