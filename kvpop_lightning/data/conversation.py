"""The conversation in a row of a file or hub data set, or the name of the reason why there is none."""

from __future__ import annotations

import json
from typing import Any

from kvpop_lightning.data.chat import Message

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


class BadRowError(ValueError):
    """Why a row cannot be used; `reason` is the name it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def messages_of(record: Any) -> list[Message]:
    """Messages of a row with `messages`, `conversations` (from, value) or `problem` and `solution`.

    Reasoning that stands apart (`reasoning_content`) goes in front of its message's content between <think>
    and </think>, and calls of tools behind it, as the chat templates of reasoning models write them.

    Raises:
        BadRowError: a field is missing, empty or of the wrong type.
    """
    if not isinstance(record, dict):
        raise BadRowError("not_an_object", f"the row is of type {type(record).__name__}, not an object")
    messages = record.get("messages")
    if messages is None and record.get("conversations") is not None:
        messages = _sharegpt(record["conversations"])
    if messages is None:
        fields = []
        for name in ("problem", "solution"):
            if record.get(name) is None:
                raise BadRowError(
                    "missing_field",
                    f"missing field {name!r} (a row has `messages`, or `problem` and `solution`; this one "
                    f"has {', '.join(map(str, record)) or 'none'})",
                )
            fields.append(_text(record[name], name))
        return [{"role": "user", "content": fields[0]}, {"role": "assistant", "content": fields[1]}]
    if not isinstance(messages, list):
        raise BadRowError("wrong_type", f"`messages` is of type {type(messages).__name__}, not a list")
    if not messages:
        raise BadRowError("empty_messages", "`messages` is empty")
    result = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if all(message["role"] != "assistant" for message in result):
        raise BadRowError("no_assistant", "no message of the assistant")
    return result


def uses_tools(record: Any) -> bool:
    """Whether a row offers tools, calls one or holds a tool's output."""
    if not isinstance(record, dict):
        return False
    messages = record.get("messages")
    return bool(record.get("tools")) or any(
        isinstance(message, dict) and (message.get("role") == "tool" or message.get("tool_calls"))
        for message in (messages if isinstance(messages, list) else ())
    )


def has_answer(record: Any) -> bool:
    """Whether a row says what the right answer is."""
    fields = record if isinstance(record, dict) else {}
    answers = (fields.get("expected_answer"), fields.get("answer"))
    return any(answer is not None and str(answer).strip() for answer in answers)


def _sharegpt(turns: Any) -> Any:
    if not isinstance(turns, list):
        raise BadRowError("wrong_type", f"`conversations` is of type {type(turns).__name__}, not a list")
    return [
        {"role": _SHAREGPT.get(str(turn.get("from")), turn.get("from")), "content": turn.get("value")}
        if isinstance(turn, dict) and "from" in turn
        else turn
        for turn in turns
    ]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict) or message.get("role") is None:
        raise BadRowError("missing_field", f"{name} needs `role` and `content`")
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls") or []
    if role not in ROLES:
        raise BadRowError("unknown_role", f"{name} has the role {role!r}, not one of {ROLES}")
    if calls and content is None:
        content = ""
    if content is None:
        raise BadRowError("missing_field", f"{name} needs `role` and `content`")
    text = content if calls and content == "" else _text(content, f"{name}.content")
    if reasoning := message.get("reasoning_content"):
        text = (
            f"<think>\n{_text(reasoning, f'{name}.reasoning_content').strip()}\n</think>\n\n{text.lstrip()}"
        )
    for call in calls:
        called = call.get("function", call) if isinstance(call, dict) else call
        text += f"\n<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>"
    return {"role": role, "content": text}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError("wrong_type", f"{name} is of type {type(value).__name__}, not a string")
    if not value.strip():
        raise BadRowError("empty_text", f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError("not_unicode", f"{name} holds half of a surrogate pair") from None
    return value
